from __future__ import annotations

import pytest
import torch

from forerun.errors import InvalidArgument
from forerun.math.theory import (
    acceptance,
    best_draft_length,
    best_length,
    expected_tokens,
    operations_factor,
    walltime_factor,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("gamma", [0, 1, 5, 20])
def test_expected_tokens_is_the_geometric_sum(alpha: float, gamma: int):
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-12)


def test_a_perfect_draft_gains_all_its_tokens_and_one():
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(1 - 1e-15, 7) == pytest.approx(8)


def test_published_example_of_seven_tokens():
    assert expected_tokens(0.87, 7) == pytest.approx(5.17, abs=0.01)
    assert (expected_tokens(0.87, 7) - 1) / 7 == pytest.approx(0.60, abs=0.01)


def test_walltime_and_operations_agree_with_their_closed_forms():
    alpha, gamma, c = 0.7, 4, 0.05
    assert walltime_factor(alpha, gamma, c) == pytest.approx((1 - alpha**5) / ((1 - alpha) * (gamma * c + 1)))
    assert operations_factor(alpha, gamma, c) == pytest.approx((1 - alpha) * (gamma * c + gamma + 1) / (1 - alpha**5))
    assert operations_factor(0.0, 4, 0.0) == 5


@pytest.mark.parametrize("c", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.9])
def test_drafting_pays_exactly_if_acceptance_exceeds_cost(alpha: float, c: float):
    best = best_draft_length(alpha, c, 64)
    assert (best > 0) == (alpha > c)
    assert all(walltime_factor(alpha, best, c) >= walltime_factor(alpha, k, c) for k in range(65))


def test_a_free_draft_is_as_long_as_allowed_and_a_useless_one_is_empty():
    assert best_draft_length(0.9, 0.0, 12) == 12
    assert best_draft_length(0.0, 0.1, 12) == 0


def test_best_length_follows_a_measured_cost_curve():
    survival = [0.9, 0.8, 0.7, 0.6]
    staircase = [1.0, 1.1, 1.2, 3.0, 3.1]  # scoring a fourth position takes a second tile
    assert best_length(survival, lambda k: staircase[k]) == 2
    assert best_length(survival, lambda k: 1.0) == 4
    assert best_length([], lambda k: 1.0) == 0


def test_acceptance_is_one_minus_total_variation():
    torch.manual_seed(0)
    p, q = torch.rand(2, 50, 9, dtype=torch.float64).softmax(dim=-1)
    assert torch.allclose(acceptance(p, q), 1 - (p - q).abs().sum(dim=-1) / 2)


def test_stopping_all_rows_together_wastes_most_of_the_draft():
    common = 0.8**5
    assert common == pytest.approx(0.33, abs=0.01)
    assert expected_tokens(common, 100) == pytest.approx(1.5, abs=0.02)
    assert expected_tokens(0.8, 100) == pytest.approx(5)


@pytest.mark.parametrize(("alpha", "gamma"), [(-0.1, 3), (1.1, 3), (float("nan"), 3), (0.5, -1)])
def test_impossible_arguments_are_refused(alpha: float, gamma: int):
    with pytest.raises(InvalidArgument):
        expected_tokens(alpha, gamma)
