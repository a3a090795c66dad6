"""What may be sent when: joined, the pieces are the text up to the first stop string, and nothing is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine import Progress, Request
from forerun.engine.stops import StopRule
from forerun.result import decode_text
from forerun.serve.answer_text import AnswerText
from forerun.types import Origin
from support.folders import byte_tokenizer

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


def sent(tokens: list[int], sizes: list[int], stops: list[str], num_unstopped: int = 0) -> tuple[list[str], bool]:
    text, parts = AnswerText(TOKENIZER, stops, frozenset({END}), num_unstopped=num_unstopped), []
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
