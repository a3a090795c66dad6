"""What tokens are worth, and which lengths follow from it."""

from __future__ import annotations

from itertools import product

import pytest

from forerun.policy.cost import FIXED, ReadCost, ScoreCost
from forerun.policy.plan import best_lengths, token_weights

PLAIN = [0.0, 0.04, 0.05, 0.055, 0.058]  # seconds of rounds of 0, 1, ... rows


def plain_seconds(left: tuple[int, ...]) -> float:
    """Until the last row has ended, each round with the rows that are still there."""
    return sum(PLAIN[sum(tokens > done for tokens in left)] for done in range(max(left)))


@pytest.mark.parametrize("left", list(product((3, 5, 9), (3, 6), (5, 8), (2, 12))))
def test_a_token_is_worth_the_time_that_the_call_is_shorter_without_it(left: tuple[int, ...]) -> None:
    """Rows that end together count together: each is worth what it adds where all of them have one token less."""
    weights = token_weights(left, PLAIN)
    assert sum(weights) == pytest.approx(len(left)), "one on average"
    for tokens in set(left):
        shorter = tuple(n - (n == tokens) for n in left)
        saved = plain_seconds(left) - plain_seconds(shorter)
        together = sum(weight for weight, n in zip(weights, left, strict=True) if n == tokens)
        assert together * PLAIN[-1] / len(left) == pytest.approx(saved)


def test_only_the_slowest_row_is_drafted_for_where_others_save_nothing() -> None:
    """Rounds that take as long with one row as with three: the others could only end earlier than the call does."""
    weights = token_weights((10, 10, 30), [0.0, 0.05, 0.05, 0.05])
    chances = [[weight * chance for chance in (0.8, 0.6)] for weight in weights]
    score = [0.05, 0.06, 0.065, 0.07, 0.075, 0.08, 0.085]
    assert best_lengths(chances, score, [0.0, 0.001, 0.002]) == (0, 0, 2)
    assert best_lengths([[0.8, 0.6]] * 3, score, [0.0, 0.001, 0.002]) == (2, 2, 2)


def test_rounds_of_fewer_rows_lie_on_a_line_through_the_fewest_that_were_measured() -> None:
    cost = ScoreCost()
    for _ in range(3):
        cost.add(8, 8, 0.080)
    assert cost.plain_up_to(8)[1] == pytest.approx(0.080 * (FIXED + (1 - FIXED) / 8)), "a guess"
    for _ in range(3):
        cost.add(2, 2, 0.032)
    assert cost.plain_up_to(8) == pytest.approx([0.0, *(0.016 + 0.008 * rows for rows in range(1, 9))])


def test_reading_is_guessed_until_it_was_measured_and_a_few_tokens_are_free() -> None:
    cost = ReadCost()
    assert cost.seconds(500, 0.02) == pytest.approx(500 * 0.01 * 0.02)
    cost.add(500, 0.05, 0.02)
    assert cost.seconds(1000, 0.02) == pytest.approx(0.1)
    assert cost.seconds(16, 0.02) == 0.0
    cost.add(16, 9.0, 0.02)
    assert cost.seconds(1000, 0.02) == pytest.approx(0.1), "what a short text took says nothing of reading"
