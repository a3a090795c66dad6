"""Which lengths follow from what rounds cost and tokens are worth."""

from __future__ import annotations

import pytest

from forerun.policy.cost import FIXED, ReadCost, ScoreCost
from forerun.policy.plan import RoundPrices, best_copies, best_lengths, best_size
from forerun.policy.worth import Worth


def test_only_the_slowest_row_is_drafted_for_where_others_save_nothing() -> None:
    """Rounds that take as long with one row as with three: the others could only end earlier than the call does."""
    chances, score = [[0.8, 0.6]] * 3, [0.05, 0.06, 0.065, 0.07, 0.075, 0.08, 0.085]
    uneven = Worth((10, 10, 30), fixed=1.0)
    assert best_lengths(chances, score, [0.0, 0.001, 0.002], worth=uneven) == (0, 0, 2)
    assert best_lengths(chances, score, [0.0, 0.001, 0.002]) == (2, 2, 2)


def test_a_copy_of_a_row_that_is_ahead_is_left_alone() -> None:
    copies = [[0.9] * 4, [0.9] * 4, [], []]
    prices = RoundPrices([0.028 + 0.0056 * n for n in range(17)], [0.0] * 5, ())
    nothing, none = (0,) * 4, [0.0] * 4
    assert best_copies(copies, nothing, none, prices) == (4, 4, 0, 0), "the control: all tokens alike"
    assert best_copies(copies, nothing, none, prices, worth=Worth((20, 20, 20, 20), 0.66)) == nothing
    assert best_copies(copies, nothing, none, prices, worth=Worth((40, 20, 20, 20), 0.66)) == (4, 0, 0, 0)


def test_one_length_for_all_goes_as_far_as_scoring_was_priced_and_no_further() -> None:
    """Rows with room for one token and for three: what three drafted tokens take is known, what four take is not."""
    chances, draft = [[0.9], [0.9, 0.8, 0.7]], [0.0, 0.0, 0.0]
    assert best_size(chances, [0.05] * 4, draft, (1, 2)) == (1, 1)
    assert best_size(chances, [0.05] * 5, draft, (1, 2)) == (1, 2), "the control: one price more"


def test_a_copy_that_promises_as_much_as_a_drawn_draft_saves_the_drawing() -> None:
    prices = RoundPrices([0.05, 0.05], [0.0, 0.02], ())
    assert best_copies([[0.5]], (1,), [0.5], prices) == (1,)
    assert best_copies([[0.5]], (1,), [0.6], prices) == (0,), "the control: a better draft is drawn"


def test_rounds_of_fewer_rows_lie_on_a_line_through_the_fewest_that_were_measured() -> None:
    cost = ScoreCost()
    for _ in range(3):
        cost.add(8, 8, 0.080)
    assert cost.plain_alone(8) == pytest.approx(0.080 * (FIXED + (1 - FIXED) / 8)), "a guess"
    for _ in range(3):
        cost.add(2, 2, 0.032)
    assert (cost.fixed(8), cost.plain_alone(8)) == pytest.approx((0.016, 0.024))


@pytest.mark.parametrize("rows", range(2, 65))
def test_a_batch_that_only_knows_itself_guesses_what_is_fixed(rows: int) -> None:
    """Also where its table is that of a neighbouring number of rows."""
    cost = ScoreCost()
    for _ in range(3):
        cost.add(rows, rows, 0.1)
    assert cost.fixed(rows) == pytest.approx(FIXED * 0.1)


def test_what_nobody_has_measured_of_several_rows_costs_half_of_what_positions_have_cost() -> None:
    """Ten positions of four rows are known: eighteen more were once taken for a tenth of what they took."""
    cost = ScoreCost()
    for _ in range(3):
        cost.add(4, 4, 0.030)
        cost.add(4, 7, 0.050)
        cost.add(4, 10, 0.052)
    assert cost.table(4, 24)[24] == pytest.approx(0.052 + 18 * (0.052 - 0.030) / 6 / 2)


def test_reading_is_guessed_until_it_was_measured_and_a_few_tokens_are_free() -> None:
    cost = ReadCost()
    assert cost.seconds(500, 0.02) == pytest.approx(500 * 0.01 * 0.02)
    cost.add(500, 0.05, 0.02)
    assert cost.seconds(1000, 0.02) == pytest.approx(0.1)
    assert cost.seconds(16, 0.02) == 0.0
    cost.add(16, 9.0, 0.02)
    assert cost.seconds(1000, 0.02) == pytest.approx(0.1), "what a short text took says nothing of reading"
