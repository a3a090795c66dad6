"""What tokens are worth to a call that ends with its slowest row."""

from __future__ import annotations

from itertools import product

import pytest

from forerun.policy.worth import Worth

FIXED, EACH = 0.04, 0.01  # seconds of a plain round: in any case, and a row


def plain_seconds(left: tuple[int, ...]) -> float:
    """Until the last row has ended, each round with the rows that are still there."""
    return sum(FIXED + EACH * sum(tokens > done for tokens in left) for done in range(max(left)))


@pytest.mark.parametrize("kept", [(1, 0, 0, 0), (0, 0, 0, 2), (1, 1, 1, 1), (0, 2, 1, 0)])
@pytest.mark.parametrize("left", list(product((3, 5, 9), (3, 6), (5, 8), (3, 12))))
def test_tokens_are_worth_the_time_that_the_call_is_shorter_without_them(
    left: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    whole = FIXED + EACH * len(left)
    saved = plain_seconds(left) - plain_seconds(tuple(n - own for n, own in zip(left, kept, strict=True)))
    assert Worth(left, FIXED / whole).of(kept) * whole / len(left) == pytest.approx(saved)


def test_rows_that_end_together_are_worth_more_together() -> None:
    worth = Worth((8, 8, 8), 0.6)
    assert worth.of((1, 1, 1)) == pytest.approx(3)
    assert worth.of((1, 0, 0)) == pytest.approx(0.4), "its own part of a round in which it has ended"
    assert worth.expected((1, 1, 1)) < worth.of((1, 1, 1)), "one of them will get less far than expected"
    assert Worth((8, 3, 3), 0.6).expected((1, 0, 0)) == Worth((8, 3, 3), 0.6).of((1, 0, 0))


def test_a_row_that_ends_when_the_slowest_then_does_need_not_get_ahead() -> None:
    worth = Worth((8, 7), 0.6)
    assert worth.expected((1, 0)) == worth.of((1, 0)), "one row has to get ahead, and there is no least of one"
    assert worth.expected((1.5, 0.5)) < worth.of((1.5, 0.5)), "the control: both have to"


def test_weights_are_one_on_average_and_greater_for_the_slowest() -> None:
    weights = Worth((8, 8, 3), 0.6).weights(3)
    assert sum(weights) == pytest.approx(3)
    assert weights[0] == weights[1] > 1 > weights[2]


def test_where_nobody_knows_when_rows_end_tokens_are_alike() -> None:
    assert Worth().of((1, 0, 2)) == Worth().expected((1, 0, 2)) == 3
    assert Worth().weights(2) == [1, 1]


@pytest.mark.parametrize("left", [(), (8, 8, 3, 8), (5, 9, 9, 2), (4, 4, 4, 4), (7, 7, 8, 7)])
def test_token_by_token_is_all_at_once(left: tuple[int, ...]) -> None:
    worth, kept = Worth(left, 0.6), [0.0] * 4
    tokens = [(row, 0.9**place) for place in range(6) for row in (2, 0, 3, 1)]
    for (row, chance), told in zip(tokens, worth.expected_along(tokens, 4), strict=True):
        kept[row] += chance
        assert told == pytest.approx(worth.expected(kept))
