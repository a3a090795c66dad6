"""A law over part of the vocabulary, against the same law written out in full."""

from __future__ import annotations

import pytest
import torch

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw, ReducedLaw
from forerun.types import LawParams
from support import rounding
from support.rounding import HALF_ULP

VOCAB = 40
IDS = torch.tensor([0, 3, 4, 11, 20, 38])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "given",
    [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.0, "top_p": 0.7}, {}],
    ids=("plain", "top-k", "top-p", "greedy"),
)
@pytest.mark.parametrize("ids", (IDS, torch.tensor([39]), torch.arange(VOCAB)), ids=("some", "last", "all"))
def test_it_is_the_full_law_with_nothing_elsewhere(given: dict[str, float], ids: torch.Tensor) -> None:
    """Logits of -inf outside `ids` mean the same."""
    generator = torch.Generator().manual_seed(3)
    small = torch.randn(3, 2, len(ids), generator=generator)
    full = torch.full((3, 2, VOCAB), -torch.inf).index_copy_(2, ids, small)
    params = LawParams.stack([SamplingParams(**given)] * 3)  # type: ignore[arg-type]
    reduced = ReducedLaw(LogitLaw.dense(small, params), ids, VOCAB)
    wanted = LogitLaw.dense(full, params)
    bound = 2 * rounding.of_law(small, given.get("temperature", 1.0))  # of shares of one or less, made twice
    for position in (torch.tensor([0, 1, 0]), torch.tensor([1, 1, 0])):
        torch.testing.assert_close(reduced.at(position), wanted.at(position), rtol=0, atol=bound)
        torch.testing.assert_close(reduced.at(position).sum(-1), torch.ones(3), rtol=0, atol=bound + VOCAB * HALF_ULP)
    for first in range(VOCAB):
        tokens = torch.tensor([[first, VOCAB - 1 - first]] * 3)
        torch.testing.assert_close(reduced.of(tokens), wanted.of(tokens), rtol=0, atol=bound)
        torch.testing.assert_close(reduced.of(tokens[:, :1]), wanted.of(tokens[:, :1]), rtol=0, atol=bound)


def test_tokens_it_cannot_say_have_no_mass() -> None:
    """Neighbours of its ids, and ids before its first and past its last."""
    params = LawParams.stack([SamplingParams(temperature=1.0)])
    ids = torch.tensor([3, 5])
    law = ReducedLaw(LogitLaw.dense(torch.zeros(1, 1, 2), params), ids, 8)
    found = [float(law.of(torch.tensor([[token]]))) for token in range(8)]
    assert found == [0, 0, 0, 0.5, 0, 0.5, 0, 0]
