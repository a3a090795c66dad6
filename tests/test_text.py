"""Tokens to text as they arrive: nothing lost, nothing twice, no half characters."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.result import decode_text
from forerun.text import StreamDecoder, decoder_of, pieces
from support.folders import byte_tokenizer

TOKENIZER = byte_tokenizer()


# Characters of one to four bytes, some of which combine: hypothesis needs seconds to list all of Unicode.
@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab \n<|>éß€中한\u0301\u200d🎉👩🏽"), max_size=30))
def test_pieces_join_to_the_text(text: str) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    assert "".join(pieces(TOKENIZER, tokens)) == decode_text(TOKENIZER, tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=30))
def test_any_tokens_at_all(tokens: list[int]) -> None:
    assert "".join(pieces(TOKENIZER, tokens)) == decode_text(TOKENIZER, tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 257), min_size=1, max_size=6), max_size=8))
def test_any_tokens_some_at_a_time(rounds: list[list[int]]) -> None:
    decoder, tokens = StreamDecoder(TOKENIZER), [token for tokens in rounds for token in tokens]
    texts = [decoder.push(*tokens) for tokens in rounds]
    assert "".join([*texts, decoder.finish()]) == decode_text(TOKENIZER, tokens)


def test_of_several_tokens_all_whole_characters_appear() -> None:
    decoder, tokens = StreamDecoder(TOKENIZER), TOKENIZER("é🎉", add_special_tokens=False).input_ids
    assert decoder.push(*tokens[:4]) == "é" and decoder.push(*tokens[4:]) == "🎉"


def test_a_tokenizer_with_a_way_of_its_own_goes_it() -> None:
    class Loud(type(TOKENIZER)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokens = TOKENIZER("abc", add_special_tokens=False).input_ids
    loud = Loud(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert decoder_of(TOKENIZER)(tokens) == "abc" and decoder_of(loud)(tokens) == "ABC"


def test_a_character_appears_when_it_is_whole() -> None:
    decoder = StreamDecoder(TOKENIZER)
    shown = [decoder.push(token) for token in TOKENIZER("é🎉", add_special_tokens=False).input_ids]
    assert shown == ["", "é", "", "", "", "🎉"]
    assert decoder.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(token) for token in TOKENIZER("a🎉", add_special_tokens=False).input_ids[:3]] == ["a", "", ""]
    assert decoder.finish() == "\ufffd"
