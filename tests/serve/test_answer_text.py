"""What may be sent when: joined, the pieces are the text up to the first stop string, and nothing is taken back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine import Progress, Request
from forerun.engine.stops import StopRule
from forerun.result import decode_text
from forerun.serve.answer_text import AnswerText
from forerun.types import Origin
from support.folders import byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()
END = 0  # <|end|>


def rounds_of(tokens: list[int], sizes: list[int]) -> list[Progress]:
    """The tokens in rounds of some sizes, again and again."""
    rounds, start, number = [], 0, 0
    while start < len(tokens):
        part = tokens[start : start + sizes[number % len(sizes)]]
        origins = (*[Origin.ACCEPTED] * (len(part) - 1), Origin.BONUS)
        rounds.append(Progress(0, 0, tuple(part), origins, None))
        start, number = start + len(part), number + 1
    return rounds


def sent(
    tokens: list[int], sizes: list[int], stops: list[str], num_unstopped: int = 0, tokenizer: Any = TOKENIZER
) -> tuple[list[str], bool]:
    text, parts = AnswerText(tokenizer, stops, frozenset({END}), num_unstopped=num_unstopped), []
    for progress in rounds_of(tokens, sizes):
        parts.append("".join(piece.text for piece in text.push(progress)))
        if text.has_stopped:
            break
    parts.append("".join(piece.text for piece in text.finish()))
    return parts, text.has_stopped


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", "日本", "🙂", " "]), max_size=12),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.sampled_from(["ab", "ba", "aab", "éa", "本🙂", "b "]), max_size=3),
)
def test_stop_strings_never_leak_and_characters_are_whole(words: list[str], sizes: list[int], stops: list[str]) -> None:
    whole = "".join(words)
    parts, stopped = sent(TOKENIZER(whole).input_ids, sizes, stops)
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(parts) == (whole[: min(places)] if places else whole)
    assert stopped == bool(places)
    assert not any("\ufffd" in part for part in parts)


def test_a_held_back_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    parts, stopped = sent(TOKENIZER("one STO").input_ids, [2], ["STOP"])
    assert "".join(parts) == "one STO" and parts[-1] == "STO" and not stopped


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    tokens = TOKENIZER("x日").input_ids[:-1]
    for ending in ([], [END]):
        parts, _ = sent([*tokens, *ending], [1], [])
        assert "".join(parts) == decode_text(TOKENIZER, tokens)


@pytest.mark.parametrize(("by_token", "sent"), ((True, ["a", "b"]), (False, ["ab"])))
def test_an_end_token_without_text_is_not_sent(by_token: bool, sent: list[str]) -> None:
    text = AnswerText(TOKENIZER, (), frozenset({END}), by_token)
    (progress,) = rounds_of([*TOKENIZER("ab").input_ids, END], [3])
    assert [piece.text for piece in text.push_all([progress])] == sent
    assert not text.finish()


@pytest.mark.parametrize("sizes", ([1], [2], [3, 1], [9]))
@pytest.mark.parametrize(("text", "least", "shown"), (
    ("abXcXd", 3, "abXc"),  # whole before so many tokens
    ("abXcXd", 2, "ab"),  # the next token may complete one
    ("aaaa", 2, "a"),  # begins before, ends behind
    ("aaXX", 4, None),
))  # fmt: skip
def test_no_stop_string_counts_before_so_many_tokens(
    sizes: list[int], text: str, least: int, shown: str | None
) -> None:
    """As the engine has it, which ends a row with the token that completes one."""
    tokens, stops = TOKENIZER(text).input_ids, ["X", "aa"]
    rule = StopRule(
        Request(prompt=(1,), max_new_tokens=9, stop_strings=tuple(stops), min_new_tokens=least, stops_early=False),
        9, TOKENIZER,
    )  # fmt: skip
    kept, reason = rule.cut([], tokens)
    assert (reason is None) == (shown is None)
    parts, stopped = sent(tokens[:kept], sizes, stops, num_unstopped=least)
    assert ("".join(parts), stopped) == (text if shown is None else shown, shown is not None)


START = 1  # <|start|>
ENDS = ["END<|end|>"]


@pytest.mark.parametrize("sizes", ([1], [2, 3], [9]))
@pytest.mark.parametrize(("parts", "stops", "shown"), (
    (("aEND", END), ENDS, "a"),
    (("aEND",), ENDS, None),
    (("aEND", START), ENDS, None),
    (("ab", START, "cd"), ["abc"], None),  # what lies between counts
    (("ab", START, "cd"), ["b<|start|>c"], "a"),
    (("ab", START, "cd"), ["rt|>c"], "ab"),
    (("é", START, END), ["<|start|><|end|>"], "é"),
))  # fmt: skip
def test_special_tokens_count_as_they_are_written(
    parts: tuple[str | int, ...], stops: list[str], shown: str | None, sizes: list[int]
) -> None:
    """In stop strings, though texts do not show them; as the engine has it."""
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else TOKENIZER(part).input_ids)]
    rule = StopRule(Request(prompt=(1,), max_new_tokens=99, stop_strings=tuple(stops)), 99, TOKENIZER)
    kept, reason = rule.cut([], tokens)
    assert (reason is None) == (shown is None)
    whole = "".join(part for part in parts if isinstance(part, str))
    told, stopped = sent(tokens[:kept], sizes, stops)
    assert ("".join(told), stopped) == (whole if shown is None else shown, shown is not None)


SPACED = sentencepiece_tokenizer()
FIRST_SPACED = sentencepiece_tokenizer(scheme="metaspace")


@pytest.mark.quick("metaspace")
@pytest.mark.parametrize("tokenizer", (TOKENIZER, SPACED, FIRST_SPACED), ids=("bytes", "strip", "metaspace"))
def test_stops_are_found_where_the_engine_finds_them(tokenizer: Any) -> None:
    """And nothing of them is sent, though the decoder may take the first space, or write special tokens apart."""
    source = random.Random(3)
    plain = tokenizer("a b ab c", add_special_tokens=False).input_ids
    special = sorted(set(tokenizer.all_special_ids))
    for _ in range(600):
        tokens = source.choices([*plain, *special], k=source.randint(1, 8))
        whole = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        start = source.randrange(max(len(whole), 1))
        stop, least = whole[start : start + source.randint(1, 8)] or "a", source.choice([0, 0, 2, 4])
        request = Request(
            prompt=(5,), max_new_tokens=99, stop_strings=(stop,), stops_in_prompt=False, min_new_tokens=least,
            stops_early=False,
        )  # fmt: skip
        kept, reason = StopRule(request, 99, tokenizer).cut([], tokens)
        parts, stopped = sent(tokens[:kept], [source.randint(1, 3)], [stop], least, tokenizer)
        case = tokenizer.convert_ids_to_tokens(tokens), stop, least, parts
        assert stopped == (reason is not None), case
        shown = decode_text(tokenizer, tokens[:kept])
        if not stopped:
            assert "".join(parts) == shown, case
        elif not least:  # the stop string is the first there is
            written = tokenizer.decode(tokens[:kept], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            taken = len(without_special(tokenizer, written)) - len(shown)  # the first space, where there is one
            assert "".join(parts) == without_special(tokenizer, written[: written.find(stop)])[taken:], case


def without_special(tokenizer: Any, written: str) -> str:
    """Less a special token that is cut in two, too; plain text has no "<"."""
    for name in tokenizer.all_special_tokens:
        written = written.replace(name, "")
    return written.partition("<")[0]


@pytest.mark.parametrize(("stop", "shown"), ((" b", ""), ("b", ""), ("</s> b", ""), (" c", "b"), ("c", "b ")))
def test_a_space_that_is_not_sent_counts_in_stop_strings(stop: str, shown: str) -> None:
    """The engine reads "</s> b c"; sent is "b c"."""
    tokens = [SPACED.eos_token_id, *SPACED("b c", add_special_tokens=False).input_ids]
    parts, stopped = sent(tokens, [1], [stop], tokenizer=SPACED)
    assert ("".join(parts), stopped) == (shown, True)


@pytest.mark.parametrize(("stop", "shown"), (("b", " "), ("c", " b "), (" b", "")))
@pytest.mark.parametrize("ends", (0, 1, 9))
def test_the_space_behind_a_prompt_counts_in_stop_strings(ends: int, stop: str, shown: str) -> None:
    """It is sent, whatever special tokens the prompt ends with; the engine, which reads the answer alone, goes on."""
    context, tokens = (SPACED(words, add_special_tokens=False).input_ids for words in ("a", "b c"))
    text = AnswerText(SPACED, (stop,), context=[*context, *[SPACED.eos_token_id] * ends])
    assert "".join(piece.text for piece in text.push_all(rounds_of(tokens, [1]))) == shown and text.has_stopped


def test_behind_special_tokens_alone_no_space_counts_in_stop_strings() -> None:
    """None is sent, and the engine reads none."""
    text = AnswerText(SPACED, (" b",), context=[SPACED.bos_token_id])
    pieces = text.push_all(rounds_of(SPACED("b c", add_special_tokens=False).input_ids, [1]))
    assert "".join(piece.text for piece in [*pieces, *text.finish()]) == "b c" and not text.has_stopped
