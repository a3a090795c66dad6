"""Where nothing pays, few rounds ask; where something might, every round does."""

from __future__ import annotations

from dataclasses import replace

from forerun.policy import CostModel
from forerun.policy.rest import FIRST_HOPE, FIRST_WEIGHT, ROUNDS, WORTH_RESTING, Rest
from forerun.types import BatchView
from policy.rounds import outcome, view

ROWS, PLAIN = (0, 1, 2, 3), 0.05
DEAR, FREE = 0.02, 0.001  # of a plain round, what asking takes


def settled() -> CostModel:
    """A policy that knows that no draft pays, and has no means to try one."""
    policy = CostModel(exploration=0.0)
    policy._trust.credit = 0.0
    for seconds in (PLAIN, PLAIN, PLAIN, 10 * PLAIN, 10 * PLAIN, 10 * PLAIN):
        drafted = (1, 1, 1, 1) if seconds > PLAIN else (0,) * 4
        policy.observe(outcome(ROWS, drafted, (0,) * 4, score_seconds=seconds))
    return policy


def mixed(*requests: int) -> BatchView:
    return replace(view(*requests), is_mixed=True)


def looks(policy: CostModel, rounds: int, cost: float) -> int:
    """How many rounds look for copies, of which none is ever worth verifying."""
    count = 0
    for _ in range(rounds):
        assert not any(policy.lengths(mixed(*ROWS)))
        looked = any(policy.copy_lengths(mixed(*ROWS)) or ())
        count += looked
        told = outcome(ROWS, (0,) * 4, (0,) * 4, draft_seconds=cost * PLAIN * looked, score_seconds=PLAIN)
        policy.observe(replace(told, copied=(True,) * 4))
    return count


def test_most_rounds_ask_nobody_where_asking_costs_something() -> None:
    policy = settled()
    first = int(FIRST_HOPE * FIRST_WEIGHT / DEAR)
    assert looks(policy, first, DEAR) == first, "hope lasts for a while"
    looks(policy, 2 * (ROUNDS + 1), DEAR)
    assert looks(policy, 10 * (ROUNDS + 1), DEAR) == 10


def test_cheap_asking_is_done_every_round() -> None:
    assert FREE < WORTH_RESTING
    assert looks(settled(), 200, FREE) == 200


def test_a_new_row_ends_the_rest() -> None:
    policy = settled()
    looks(policy, 40, DEAR)
    while any(policy.copy_lengths(_asked(policy, 0, 1, 2, 3)) or ()):
        looks(policy, 1, DEAR)
    assert any(policy.copy_lengths(_asked(policy, 0, 1, 2, 9)) or ())


def _asked(policy: CostModel, *requests: int) -> BatchView:
    policy.lengths(mixed(*requests))
    return mixed(*requests)


def test_rounds_with_drafts_are_not_followed_by_rest() -> None:
    rest = Rest()
    rest.holds(ROWS)
    for _ in range(100):
        rest.consider(0.0, DEAR, is_plain=True)
    assert rest.holds(ROWS)
    for _ in range(ROUNDS):
        rest.holds(ROWS)
    rest.consider(-0.5, DEAR, is_plain=False)
    assert not rest.holds(ROWS)


def test_rounds_that_gain_make_up_for_many_that_do_not() -> None:
    rest = Rest()
    rest.holds(ROWS)
    for number in range(200):
        gains = number % 10 == 0
        rest.consider(0.5 if gains else 0.0, DEAR, is_plain=not gains)
        assert not rest.holds(ROWS)
