"""Experts that give back what they are given, against a sum written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.math.experts import ExpertWeights, run_experts, without_identities
from forerun.math.routing import Router, Scoring, route
from forerun.math.skinny import Activation


def test_identities_are_what_a_row_counts_itself() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(3, 8), ExpertWeights(torch.randn(2, 12, 8), torch.randn(2, 8, 6), Activation.SILU)
    chosen, shares = torch.tensor([[0, 3, 1], [2, 3, 4], [1, 0, 2]]), torch.rand(3, 3)
    own_shares, own_chosen, identities = without_identities(shares, chosen, 2)
    assert own_chosen.max() < 2 and identities.share.shape == (3, 1)
    got = identities.added(run_experts(x, own_chosen, own_shares, weights), x)
    for row in range(3):
        want = torch.zeros(8)
        for place, expert in enumerate(chosen[row].tolist()):
            alone = torch.tensor([[expert]]), torch.ones(1, 1)
            made = x[row] if expert >= 2 else run_experts(x[row][None], *alone, weights)[0]
            want += shares[row, place] * made
        torch.testing.assert_close(got[row], want)


def test_identities_stay_apart_from_experts_that_the_row_has_not_chosen() -> None:
    """The first expert is infinite: nothing times that is no number."""
    x, first = torch.randn(2, 8), torch.randn(3, 12, 8)
    first[0] = torch.inf
    weights = ExpertWeights(first, torch.randn(3, 8, 6), Activation.SILU)
    shares, chosen, identities = without_identities(torch.full((2, 2), 0.5), torch.tensor([[3, 2], [4, 3]]), 3)
    made = run_experts(x, chosen, shares, weights)
    assert made[1].isnan().any(), "control"
    got = identities.added(made, x)
    alone = run_experts(x[:1], torch.tensor([[2]]), torch.tensor([[0.5]]), weights)[0]
    torch.testing.assert_close(got, torch.stack([alone + x[0] / 2, x[1]]))


@pytest.mark.parametrize(("correction", "chosen"), [(None, {0, 1}), (torch.zeros(4), {2, 3})], ids=["best", "best two"])
def test_groups_are_chosen_by_their_best_expert_or_of_corrected_scores_by_two(
    correction: Tensor | None, chosen: set[int]
) -> None:
    router = Router(torch.eye(4), None, 2, Scoring.SIGMOID, correction=correction, num_groups=2, top_groups=1)
    _, found = route(torch.tensor([[2.0, -5.0, 1.0, 1.0]]), router)
    assert set(found[0].tolist()) == chosen
