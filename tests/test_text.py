"""Tokens to text as they arrive: nothing lost, nothing twice, no half characters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.result import decode_text
from forerun.text import StreamDecoder, pieces
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


def test_a_character_appears_when_it_is_whole() -> None:
    decoder = StreamDecoder(TOKENIZER)
    shown = [decoder.push(token) for token in TOKENIZER("é🎉", add_special_tokens=False).input_ids]
    assert shown == ["", "é", "", "", "", "🎉"]
    assert decoder.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(token) for token in TOKENIZER("a🎉", add_special_tokens=False).input_ids[:3]] == ["a", "", ""]
    assert decoder.finish() == "\ufffd"
