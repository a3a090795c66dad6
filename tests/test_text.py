"""Tokens to text as they arrive: nothing lost, nothing twice, no half characters."""

from __future__ import annotations

from itertools import combinations, groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.result import decode_text
from forerun.text import StreamDecoder, decoder_of, pieces
from support.folders import PIECES, byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()
SENTENCEPIECE = {scheme: sentencepiece_tokenizer(scheme=scheme) for scheme in ("strip", "metaspace")}
SPECIAL, UNKNOWN = ("<unk>", "<s>", "</s>"), 9999  # an id that the vocabulary does not have
BYTES = tuple(f"<0x{byte:02X}>" for byte in (0x20, 0x61, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xFF))


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


def ids(*names: str) -> list[int]:
    return [SENTENCEPIECE["strip"].convert_tokens_to_ids(name) for name in names]


def streamed(tokenizer: Any, rounds: list[list[int]], context: list[int] | None = None) -> str:
    decoder = StreamDecoder(tokenizer, context or [])
    return "".join([*(decoder.push(*tokens) for tokens in rounds), decoder.finish()])


def cuts(tokens: list[int]) -> list[list[list[int]]]:
    """All ways to push them."""
    places = range(1, len(tokens))
    chosen = [ends for number in range(len(tokens)) for ends in combinations(places, number)]
    return [[tokens[a:b] for a, b in zip((0, *ends), (*ends, len(tokens)), strict=True)] for ends in chosen]


def told(names: list[str]) -> list[str]:
    """The same tokens with every run of bytes spelled out: its characters up to the first byte that is none."""
    seen = [name for name in names if name not in SPECIAL]
    spelled: list[str] = []
    for is_byte, run in groupby(seen, key=lambda name: name in BYTES):
        if not is_byte:
            spelled += run
            continue
        data = bytes(int(name[3:5], 16) for name in run)
        try:
            spelled += data.decode()
        except UnicodeDecodeError as error:
            spelled += data[: error.start].decode() + "\ufffd" * (len(data) - error.start)
    return spelled


SPACED = (
    ("\u2581hello", "</s>", "\u2581world"),
    ("</s>", "<unk>", "\u2581hello", "<s>", "</s>", "\u2581world"),
    ("\u2581", "\u2581hello", "\u2581", "</s>", "\u2581world"),
    ("\u2581\u2581", "</s>", "\u2581\u2581", "\u2581world", "lo"),
    ("\u2581a", "<0xE6>", "</s>", "<0x97>", "<0xA5>", "\u2581world"),
    ("<0xE6>", "<0x97>", "<0xA5>", "<0x20>", "<0xC3>", "<0xA9>", "\u2581a"),
    ("<0x20>", "<s>", "\u2581a", "<0xC3>", "<0xA9>", "<0x20>", "\u2581a"),
)


@pytest.mark.parametrize("scheme", SENTENCEPIECE)
@pytest.mark.parametrize("names", SPACED, ids=" ".join)
def test_spaces_stay_however_tokens_come(scheme: str, names: tuple[str, ...]) -> None:
    tokenizer, tokens = SENTENCEPIECE[scheme], ids(*names)
    ways = cuts(tokens)
    assert len(ways) == 2 ** (len(tokens) - 1)
    assert {streamed(tokenizer, rounds) for rounds in ways} == {decode_text(tokenizer, tokens)}


@pytest.mark.quick("metaspace")
@pytest.mark.parametrize("scheme", SENTENCEPIECE)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from((*PIECES, *SPECIAL, *BYTES)), min_size=1, max_size=5), max_size=8))
def test_any_pieces_bytes_and_special_tokens(scheme: str, rounds: list[list[str]]) -> None:
    """Of bytes that are no characters too: those before them are out already, whoever pushes them together."""
    tokenizer, names = SENTENCEPIECE[scheme], [name for names in rounds for name in names]
    text = streamed(tokenizer, [ids(*names) for names in rounds])
    assert text == streamed(tokenizer, [ids(name) for name in names])
    whole = "".join(told(names))
    if "<0x20>" not in names:  # of which the first may be taken away, before it is known to be no character
        assert text.lstrip(" ") == whole.replace("\u2581", " ").lstrip(" ")
    if "\ufffd" not in whole:
        assert text == decode_text(tokenizer, ids(*names))


@pytest.mark.parametrize("scheme", SENTENCEPIECE)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_behind_a_context_comes_what_the_whole_text_has_more(scheme: str, data: st.DataObject) -> None:
    names = st.lists(st.sampled_from((*PIECES[:-1], *SPECIAL, "<0x61>", "\u65e5")), max_size=12)
    tokenizer = SENTENCEPIECE[scheme]

    def spelled(names: list[str]) -> list[int]:
        parts = [("<0xE6>", "<0x97>", "<0xA5>") if name == "\u65e5" else (name,) for name in names]
        return ids(*(part for some in parts for part in some))

    context, new = spelled(data.draw(names)), spelled(data.draw(names))
    size = data.draw(st.integers(1, 4))
    text = streamed(tokenizer, [new[start : start + size] for start in range(0, len(new), size)], context)
    assert decode_text(tokenizer, context) + text == decode_text(tokenizer, [*context, *new])


def test_a_context_that_ends_within_a_character_is_not_told_again() -> None:
    tokens = TOKENIZER("x日y", add_special_tokens=False).input_ids
    assert streamed(TOKENIZER, [[token] for token in tokens[2:]], tokens[:2]) == "\ufffdy"
    assert StreamDecoder(TOKENIZER, tokens * 1000).push(*tokens) == "x日y"


def test_thousands_of_tokens_without_text_are_not_decoded_again_and_again() -> None:
    tokenizer = SENTENCEPIECE["strip"]
    silent = [*ids(*SPECIAL), UNKNOWN]
    for start in ([], ["\u2581"], ["\u2581hello"]):
        decoder, decoded = StreamDecoder(tokenizer), 0
        decode = decoder._decode

        def counted(tokens: list[int], decode: Any = decode) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return str(decode(tokens))

        decoder._decode = counted
        texts = [decoder.push(token) for token in [*ids(*start), *silent * 500, *ids("\u2581world")]]
        assert "".join(texts) == decode_text(tokenizer, ids(*start, "\u2581world")) and decoded < 5 * len(texts)
