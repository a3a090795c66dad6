"""Prompt lookup: the right continuation, found in time proportional to the new tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import SamplingParams
from forerun.drafters import PromptLookup
from forerun.errors import InvalidArgument
from forerun.types import DraftContext, LawParams

VOCAB = 50


def context(
    histories: Sequence[Sequence[int]], rooms: int | Sequence[int] = 4, rows: Sequence[int] | None = None
) -> DraftContext:
    count = len(histories)
    rooms = (rooms,) * count if isinstance(rooms, int) else tuple(rooms)
    return DraftContext(
        rows=tuple(range(count)) if rows is None else tuple(rows),
        histories=tuple(histories),
        max_lengths=rooms,
        params=LawParams.stack([SamplingParams()] * count),
        uniforms=torch.zeros(count, max(rooms, default=0), dtype=torch.float64),
        adjusters=(None,) * count,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )


def guess(lookup: PromptLookup, history: Sequence[int], room: int = 4, row: int = 0) -> tuple[list[int], int]:
    """Drafted tokens and evidence of one row."""
    draft = lookup.propose(context([history], room, [row]))
    assert draft.evidence is not None
    return draft.tokens[0, : draft.lengths[0]].tolist(), draft.evidence[0]


def search(history: Sequence[int], lookup: PromptLookup, room: int) -> tuple[list[int], int]:
    """The same answer by looking everywhere: token by token, with the drafted tokens as part of the text."""
    for n in reversed(lookup.orders):
        ends = [e for e in range(n, len(history)) if list(history[e - n : e]) == list(history[len(history) - n :])]
        if ends:
            begin = ends[-1] if lookup.newest else ends[0]
            text = list(history)
            for i in range(min(room, lookup.max_tokens)):
                text.append(text[begin + i])
            same = [a == b for a, b in zip(reversed(history[:begin]), reversed(history), strict=False)]
            return text[len(history) :], min([*same, False].index(False), 8)
    return [], 0


@pytest.mark.parametrize(
    ("history", "expected", "evidence"),
    [
        ([], [], 0),
        ([7], [], 0),
        ([7, 8], [], 0),
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9], 2),
        ([1, 2, 3, 8, 2, 5, 8, 1, 2], [3, 8, 2, 5], 2),  # the longer match, although 2 alone occurred later
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2], 2),  # the newer of two equal matches
        ([5, 6, 7, 1, 5, 6, 7], [1, 5, 6, 7], 3),
        ([4, 4], [4, 4, 4, 4], 1),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1], 3),
        ([9, 1, 2, 1, 2], [1, 2, 1, 2], 2),  # the copy follows itself
    ],
)
def test_copies_what_followed_the_longest_newest_match(history: list[int], expected: list[int], evidence: int) -> None:
    assert guess(PromptLookup(), history) == (expected, evidence)


def test_oldest_match_on_request() -> None:
    history = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert guess(PromptLookup(newest=False), history)[0] == [3, 8, 1, 2]


def test_evidence_looks_further_back_than_the_index() -> None:
    text = list(range(20))
    assert guess(PromptLookup(max_ngram=2), [*text, 30, *text[3:9]]) == ([9, 10, 11, 12], 6)
    assert guess(PromptLookup(max_ngram=2), [*text, 30, *text[3:18]])[1] == 8


def test_shortest_match_and_longest_draft_are_limits() -> None:
    history = [1, 2, 3, 8, 2]
    assert guess(PromptLookup(min_ngram=2), history) == ([], 0)
    assert guess(PromptLookup(max_tokens=2), history, room=4)[0] == [3, 8]
    assert guess(PromptLookup(max_tokens=9), history, room=1)[0] == [3]


@given(
    history=st.lists(st.integers(0, 2), max_size=60),
    steps=st.lists(st.integers(1, 5), max_size=30),
    orders=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    newest=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_incremental_index_agrees_with_brute_force(
    history: list[int], steps: list[int], orders: list[int], newest: bool
) -> None:
    lookup = PromptLookup(orders[1], orders[0], max_tokens=6, newest=newest)
    end = 0
    for step in [0, *steps]:
        end = min(end + step, len(history))
        assert guess(lookup, history[:end], room=8) == search(history[:end], lookup, 8)


def test_ragged_rows_and_rows_without_room() -> None:
    histories = [[1, 2, 1], [3], [5, 6, 7, 8, 5], [5, 6, 5], [1, 2, 3, 4, 1]]
    draft = PromptLookup().propose(context(histories, [2, 4, 3, 0, 1]))
    assert draft.lengths.tolist() == [2, 0, 3, 0, 1]
    assert draft.tokens.shape == (5, 3) and draft.tokens.dtype == torch.int64
    assert draft.tokens[0, :2].tolist() == [2, 1] and draft.tokens[2].tolist() == [6, 7, 8]
    assert draft.evidence == (1, 0, 1, 0, 1)


@pytest.mark.parametrize("rooms", [[0, 0], [4, 4]])
def test_silence_is_a_draft_of_width_zero(rooms: list[int]) -> None:
    draft = PromptLookup().propose(context([[1, 2], [3]], rooms))
    assert draft.tokens.shape == (2, 0) and draft.lengths.tolist() == [0, 0] and draft.evidence == (0, 0)


def test_law_is_a_point_mass_on_the_copied_tokens() -> None:
    draft = PromptLookup().propose(context([[1, 2, 3, 1]], 3))
    assert draft.deterministic
    assert draft.law.of(draft.tokens).tolist() == [[1, 1, 1]]
    assert draft.law.of(draft.tokens + 1).tolist() == [[0, 0, 0]]
    assert draft.law.at(torch.tensor([1]))[0].nonzero().flatten().tolist() == [3]


def test_rows_do_not_share_text() -> None:
    lookup = PromptLookup()
    lookup.propose(context([[1, 2, 3, 1]], rows=[0]))
    assert guess(lookup, [1, 2, 4, 1], row=1)[0][0] == 2
    assert guess(lookup, [9, 1], row=2) == ([], 0)


def test_admit_and_release_forget_a_row() -> None:
    for forget in (lambda x: x.release(0), lambda x: x.admit(0, [1, 2, 3])):
        lookup = PromptLookup()
        guess(lookup, [1, 2, 3, 1])
        forget(lookup)
        assert not lookup._indexes
    PromptLookup().release(5)  # unknown rows are no trouble


@given(old=st.lists(st.integers(0, 2), max_size=30), new=st.lists(st.integers(0, 2), max_size=30))
@settings(max_examples=200, deadline=None)
def test_another_text_in_the_same_row_is_noticed(old: list[int], new: list[int]) -> None:
    """Texts that agree in the fingerprint may be taken for one another; the copied tokens are still from the text."""
    lookup = PromptLookup()
    guess(lookup, old)
    tokens, _ = guess(lookup, new)
    agrees = len(new) >= len(old) and new[max(len(old) - 8, 0) : len(old)] == old[-8:]
    if not agrees:
        assert (tokens, _) == search(new, lookup, 4)
    assert set(tokens) <= set(new)


def test_rewind_below_the_indexed_text_drops_the_index() -> None:
    lookup = PromptLookup()
    guess(lookup, [1, 2, 3, 1])
    lookup.rewind([0, 9], [4, 1])
    assert 0 in lookup._indexes
    lookup.rewind([0], [3])
    assert 0 not in lookup._indexes


class Watched(list[int]):
    """A text that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, key: int | slice) -> int | list[int]:  # type: ignore[override]
        found = super().__getitem__(key)
        Watched.read += len(found) if isinstance(found, list) else 1
        return found


def test_cost_of_a_round_does_not_grow_with_the_text() -> None:
    generator = torch.Generator().manual_seed(0)
    costs = []
    for length in (100, 4000):
        history = Watched(torch.randint(0, 40, (length,), generator=generator).tolist())
        lookup = PromptLookup()
        guess(lookup, history)
        Watched.read = 0
        history.extend([1, 2, 3])
        guess(lookup, history)
        costs.append(Watched.read)
    assert max(costs) < 60, costs


@pytest.mark.parametrize(
    "bad",
    [
        {"min_ngram": 0}, {"min_ngram": 4}, {"max_ngram": 0}, {"max_tokens": 0}, {"max_ngram": 2.5},
        {"min_ngram": None}, {"max_ngram": "3"}, {"newest": "no"}, {"source": None},
    ],
)  # fmt: skip
def test_impossible_limits_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=str(next(iter(bad)))):
        PromptLookup(**bad)
