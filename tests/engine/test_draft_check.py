"""Laws of a user's drafter: what a rule may ask of them is there, and each fault is named. One fault a case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.drafters.chain import NarrowLaw
from forerun.engine.draft_check import _why_not
from forerun.math.laws import LogitLaw, MixedLaw, PointMass, ReducedLaw, SparseLaw, TableLaw
from forerun.types import Law, LawParams

VOCAB, ROWS, WIDTH = 10, 2, 3
LENGTHS = torch.tensor([3, 2])
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 99]])  # past a row's length lies anything


def sparse(
    place: tuple[int, int] = (0, 0), number: int = 7, chance: float = 0.5, dtype: torch.dtype = torch.int64
) -> SparseLaw:
    """Two tokens a position, and a third entry that is padding; one of them as a case wants it."""
    ids = torch.tensor([7, 8, -1]).repeat(ROWS, WIDTH, 1)
    probs = torch.tensor([0.5, 0.5, 0.0]).repeat(ROWS, WIDTH, 1)
    ids[(*place, 0)], probs[(*place, 0)] = number, chance
    return SparseLaw(ids.to(dtype), probs, VOCAB)


def table(row: int, place: int, *chances: float) -> TableLaw:
    probs = torch.full((ROWS, WIDTH, VOCAB), 1 / VOCAB)
    probs[row, place, : len(chances)] = torch.tensor(chances)
    return TableLaw(probs)


def logit_law(
    index: Tensor | None = None, owner: Tensor | None = None, rows: int = ROWS, vocab: int | None = None
) -> LogitLaw:
    index = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) if index is None else index
    owner = torch.arange(ROWS).repeat_interleave(WIDTH) if owner is None else owner
    params = LawParams.stack([SamplingParams(temperature=1.0)] * rows)
    return LogitLaw(torch.zeros(ROWS * WIDTH, VOCAB), index, params, owner, vocab)


def mixed(*choice: int) -> MixedLaw:
    return MixedLaw(torch.tensor(choice), (PointMass(TOKENS, VOCAB), sparse()))


def reduced(*ids: int, vocab: int = VOCAB, dtype: torch.dtype = torch.int64, size: int = 4) -> ReducedLaw:
    """About four ids, of which the drafted ones are the first three."""
    places = torch.tensor([[0, 1, 2], [0, 1, 99]])
    return ReducedLaw(PointMass(places, size), torch.tensor(ids).to(dtype), vocab)


GOOD: dict[str, Callable[[], Law]] = {
    "points": lambda: PointMass(TOKENS, VOCAB),
    "more points than tokens": lambda: PointMass(torch.cat([TOKENS, TOKENS], dim=1), VOCAB),
    "few tokens": sparse,
    "few tokens, whatever past the length": lambda: sparse((1, 2), VOCAB + 5, 7.0),
    "a table": lambda: table(0, 0),
    "a table, whatever past the length": lambda: table(1, 2, 5.0, -3.0),
    "logits": logit_law,
    "mixed": lambda: mixed(0, 1),
    "narrow": lambda: NarrowLaw(sparse(), WIDTH),
    "of a part of the vocabulary": lambda: reduced(1, 4, 8, 9),
    "mixed, of which the other row's is narrow": lambda: MixedLaw(
        torch.tensor([0, 1]), (PointMass(TOKENS, VOCAB), NarrowLaw(sparse(), 2))
    ),
}
BAD: dict[str, tuple[Callable[[], Law], str]] = {
    "points of another batch": (lambda: PointMass(TOKENS[:1], VOCAB), "has shape"),
    "points for shorter drafts": (lambda: PointMass(TOKENS[:, :2], VOCAB), "has shape"),
    "points of another vocabulary": (lambda: PointMass(TOKENS, VOCAB + 1), "is over 11 tokens"),
    "an id below the vocabulary": (lambda: sparse((0, 1), -1), "of no token"),
    "an id above it": (lambda: sparse((0, 1), VOCAB), "of no token"),
    "ids of another type": (lambda: sparse(dtype=torch.int32), "has ids torch.int32"),
    "too much mass": (lambda: sparse((1, 1), 7, 0.6), "not 1 together"),
    "too little": (lambda: sparse((1, 1), 7, 0.4), "not 1 together"),
    "less than nothing": (lambda: table(0, 2, -0.1, 0.3), "below 0"),
    "no number": (lambda: table(0, 2, torch.nan), "below 0"),
    "logits for shorter drafts": (lambda: logit_law(torch.zeros(ROWS, 2, dtype=torch.int64)), "has shape"),
    "logits of another vocabulary": (lambda: logit_law(vocab=VOCAB + 1), "is over 11 tokens"),
    "an owner that is not there": (lambda: logit_law(owner=torch.tensor([0, 0, 0, 1, 1, ROWS])), "names owners"),
    "an owner below": (lambda: logit_law(owner=torch.tensor([0, 0, 0, 1, 1, -1])), "names owners"),
    "fewer owners": (lambda: logit_law(owner=torch.zeros(5, dtype=torch.int64)), "has 5 owners"),
    "parameters of another batch": (lambda: logit_law(rows=3), "parameters of 3"),
    "a choice that is not there": (lambda: mixed(0, 2), "does not choose"),
    "a choice below": (lambda: mixed(0, -1), "does not choose"),
    "choices of another batch": (lambda: mixed(0, 1, 0), "does not choose"),
    "narrower than the draft": (lambda: NarrowLaw(sparse(), 2), "is of 2 positions for a draft of 3"),
    "a part with an id that is not there": (lambda: reduced(1, 4, 8, VOCAB), "does not name ids"),
    "a part with an id below": (lambda: reduced(-1, 4, 8, 9), "does not name ids"),
    "a part out of order": (lambda: reduced(1, 8, 4, 9), "does not name ids"),
    "a part with an id twice": (lambda: reduced(1, 4, 4, 9), "does not name ids"),
    "no part": (lambda: reduced(), "does not name ids"),
    "a part in another type": (lambda: reduced(1, 4, 8, 9, dtype=torch.int32), "does not name ids"),
    "a part of another vocabulary": (lambda: reduced(1, 4, 8, 9, vocab=VOCAB + 1), "is over 11 tokens"),
    "a part of another size": (lambda: reduced(1, 4, 8, 9, size=5), "is over 5 tokens"),
    "within another": (
        lambda: MixedLaw(torch.tensor([1, 0]), (PointMass(TOKENS, VOCAB), sparse((0, 1), VOCAB))),
        "of no",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_asked(name: str) -> None:
    assert _why_not(GOOD[name](), ROWS, WIDTH, VOCAB, LENGTHS) is None


@pytest.mark.parametrize("name", BAD)
def test_what_cannot(name: str) -> None:
    make, reason = BAD[name]
    assert reason in str(_why_not(make(), ROWS, WIDTH, VOCAB, LENGTHS))
