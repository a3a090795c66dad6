"""`auto` asked a round ahead, over lengths that are recorded: as good as where it hears everything first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forerun.engine.device.shapes import SIZES
from forerun.policy import BassHeuristic, Constant, CostModel
from forerun.policy.base import Policy
from forerun.policy.plan import best_lengths, best_size
from policy.recorded import RecordedWorld
from policy.rounds import outcome, view
from policy.simulation import H200

STEP = {1: 0.00022, 4: 0.00025, 8: 0.000285}  # seconds a drafted token, by rows
LENGTHS = (0, 1, 2, 4, 6, 8, 12, 16)
NOISE = 0.01  # the device's own clock


def world(rows: int, alpha: float, **options: Any) -> RecordedWorld:
    return RecordedWorld(H200, lambda tokens, kind: alpha, draft_seconds=STEP[rows], noise=NOISE, **options)


def learnt(make: Callable[[], Policy], rows: int, alpha: float, **options: Any) -> tuple[float, float, list[int]]:
    """Tokens a second over four generations from the start and over the four that follow, and lengths of the latter."""
    early, late, steps = [0.0, 0.0], [0.0, 0.0], []
    for seed in range(4):
        here, policy = world(rows, alpha, seed=seed, **options), make()
        for total in (early, late):
            before, rounds = (here.tokens, here.seconds), len(here.steps)
            for _ in range(4):
                here.generate(policy, [128] * rows)
            total[0] += here.tokens - before[0]
            total[1] += here.seconds - before[1]
        steps += here.steps[rounds:]
    return early[0] / early[1], late[0] / late[1], steps


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.6, 0.87])
@pytest.mark.parametrize("rows", [1, 8])
def test_near_the_best_constant(rows: int, alpha: float) -> None:
    early, late, steps = learnt(CostModel, rows, alpha)
    constants = {n: learnt(lambda n=n: Constant(n), rows, alpha)[1] for n in LENGTHS}
    best = max(constants.values())
    assert early >= 0.90 * best
    assert late >= 0.95 * best
    assert constants[1] < 0.9 * best, "any length would pass"
    assert set(steps) <= {0, *SIZES}


@pytest.mark.quick("1")
@pytest.mark.parametrize("rows", [1, 8])
def test_hearing_late_costs_little(rows: int) -> None:
    waiting, ahead = (learnt(CostModel, rows, 0.87, always_waits=waits)[1] for waits in (True, False))
    assert ahead >= 0.97 * waiting


def test_it_runs_ahead_once_it_knows_and_not_before() -> None:
    policy, here = CostModel(), world(8, 0.87)
    assert not policy.runs_ahead
    here.generate(policy, [128] * 8)
    assert policy.runs_ahead
    late, rounds = here.late, len(here.steps)
    here.generate(policy, [128] * 8)
    assert here.late - late >= 0.9 * (len(here.steps) - rounds)


@pytest.mark.quick("1")
@pytest.mark.parametrize("rows", [1, 8])
def test_useless_drafter_costs_little(rows: int) -> None:
    def seconds(make: Callable[[], Policy]) -> float:
        worlds = [world(rows, 0.0, seed=seed) for seed in range(3)]
        for here in worlds:
            policy = make()
            for _ in range(4):
                here.generate(policy, [128] * rows)
        return sum(here.seconds / here.tokens for here in worlds)

    plain = seconds(lambda: Constant(0))
    assert seconds(CostModel) <= 1.015 * plain
    assert seconds(lambda: Constant(4)) > 1.1 * plain, "the bound would not notice a bad policy"


def test_useless_drafts_that_cost_nothing_are_not_tried_all_the_time() -> None:
    """Finding out whether they pay makes the device wait for the host, which is most of what a trial costs."""
    plain, policy, idle = H200[1][1], CostModel(), 0.0006
    here = RecordedWorld(H200, lambda tokens, kind: 0.0, draft_seconds=5e-6, noise=NOISE, idle=idle)
    for _ in range(4):
        here.generate(policy, [128])
    learning, tokens = here.seconds, here.tokens
    for _ in range(8):
        here.generate(policy, [128])
    assert here.seconds - learning <= 1.015 * plain * (here.tokens - tokens)


def test_a_trial_among_rounds_that_wait_anyway_brings_no_more_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies begin often every round hears the one before it, with a drawn draft to try or without."""
    policy, losses = CostModel(), list[float]()
    world(1, 0.0, idle=0.0006).generate(policy, [128])
    monkeypatch.setattr(policy, "_begin_trial", lambda loss, evidence: losses.append(loss))
    here, score = replace(view(7), sizes=SIZES, is_mixed=True), policy._score.table(1, 16)
    policy.lengths(here)
    for copies_begin in (0.0, 1.0):
        policy._starts.rate = copies_begin
        policy._try(here, (16,), (0,), score, policy._draft.table(1, 16), (0.0,))
    rare, often = losses[-2:]
    assert rare > often + 0.03 and not policy.runs_ahead


@pytest.mark.slow
def test_follows_a_change_of_text() -> None:
    """Acceptance 0.9, then 0.1, then 0.9 again, a generation of eight rows after the other."""
    policy, chance = CostModel(), [0.9]
    here = RecordedWorld(H200, lambda tokens, kind: chance[0], draft_seconds=STEP[8], noise=NOISE)
    rates = []
    for alpha in (0.9, 0.1, 0.9):
        chance[0], before = alpha, (here.tokens, here.seconds)
        for number in range(10):
            if number == 7 and len(rates) == 2:
                before = here.tokens, here.seconds  # by then it has found back
            here.generate(policy, [128] * 8)
        rates.append((here.tokens - before[0]) / (here.seconds - before[1]))
    plain = 8 / H200[8][8]
    assert rates[0] > 2.5 * plain and rates[2] > 0.9 * rates[0]
    assert rates[1] > 0.95 * plain


def test_an_outcome_is_taken_for_the_round_it_belongs_to() -> None:
    """Round 2 was asked for before round 1 was heard of; a question that led to no round is forgotten."""
    policy = CostModel()
    for number in (1, 2, 3):
        policy.lengths(replace(view(7), sizes=SIZES, round_number=number))
    policy._questions[1].lengths, policy._questions[3].lengths = {0: 4}, {0: 8}
    heard = replace(outcome((7,), (4,), (2,), draft_seconds=0.001), steps=4, round_number=1)
    policy.observe(heard)
    assert policy._drafting == {7} and set(policy._questions) == {2, 3}
    policy.observe(replace(heard, round_number=3))
    assert not policy._questions
    policy.observe(replace(heard, round_number=9))
    assert not policy._drafting, "nobody asked for that one"


def test_costs_are_those_of_the_length_that_was_run() -> None:
    """The last tokens of a text: short drafts in rounds of eight."""
    policy = CostModel()
    for number in range(6):
        policy.lengths(replace(view(0, 1), sizes=SIZES, round_number=number))
        policy.observe(replace(outcome((0, 1), (2, 1), (1, 1), score_seconds=0.005), steps=8, round_number=number))
    assert [positions for positions, _ in policy.describe()["score_seconds"][2]] == [2 * 9]  # type: ignore[index]


def test_one_size_for_all_rows() -> None:
    survival = [[0.9**i for i in range(1, 17)], [0.5**i for i in range(1, 17)], [0.9]]
    score, draft = [1.0 + 0.002 * n for n in range(49)], [0.05 * n for n in range(17)]
    assert best_size(survival, score, draft, (1, 4, 8, 16)) == (8, 8, 1)
    assert best_size(survival, score, [5.0 * n for n in range(17)], (1, 4, 8, 16)) == (0, 0, 0)
    assert max(best_size(survival, score[:14], draft, (1, 4, 8, 16))) == 4, "no further than has been looked"
    assert len(set(best_lengths(survival, score, draft))) == 3, "where each token has its price, rows differ"


def test_published_rules_hear_every_round_first() -> None:
    assert not getattr(BassHeuristic(), "runs_ahead", False)
