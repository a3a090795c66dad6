"""Whether rounds wait for copies: by how often they begin and how long the device waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from forerun.policy import CostModel
from forerun.policy.heuristics import OwnAcceptance
from forerun.policy.starts import FIRST_GUESS, CopyStarts
from policy.rounds import as_draft, outcome, view

PLAIN, WAIT = 0.004, 0.0004


def heard(starts: CopyStarts, rounds: int, every: int) -> None:
    """One row; a copy of one token begins in every so many rounds, and comes true."""
    for number in range(rounds):
        begins = every > 0 and number % every == 0
        done = outcome((7,), (0,), (0,))
        starts.observe(
            replace(done, guessed=((3, True) if begins else None,), wanted=(int(begins),), idle_seconds=WAIT)
        )


def test_copies_that_begin_seldom_are_not_waited_for() -> None:
    for every, waits in ((0, False), (40, False), (4, True), (2, True)):
        starts = CopyStarts()
        heard(starts, 80, every)
        assert starts.are_worth_waiting_for(PLAIN) == waits, every


def test_where_both_cost_the_same_rounds_wait() -> None:
    starts = CopyStarts()
    starts.observe(replace(outcome((7,), (0,), (0,)), idle_seconds=FIRST_GUESS * PLAIN))
    assert starts.are_worth_waiting_for(PLAIN) and not starts.are_worth_waiting_for(0.99 * PLAIN)


def test_a_copy_that_goes_on_begins_once() -> None:
    starts = CopyStarts()
    heard(starts, 40, 0)
    before = starts.rate
    for _ in range(20):
        going_on = replace(outcome((7,), (4,), (4,)), guessed=((3, True),), wanted=(4,), idle_seconds=WAIT)
        starts.observe(going_on)
    assert starts.rate < before + 1 / 32


def test_nothing_is_sent_ahead_before_waiting_was_measured() -> None:
    starts = CopyStarts()
    starts.observe(replace(outcome((7,), (0,), (0,)), guessed=(None,), wanted=(0,), idle_seconds=0.0))
    assert starts.are_worth_waiting_for(PLAIN)


def test_auto_runs_ahead_where_the_drafter_finds_nothing() -> None:
    policy = CostModel()
    for number in range(40):
        look = replace(view(7), sizes=(1, 2, 4, 8), round_number=number)
        if any(policy.lengths(look)):
            policy.trim(look, as_draft([0], (0,)))
        done = replace(outcome((7,), (0,), (0,), score_seconds=PLAIN), steps=0, round_number=number)
        policy.observe(replace(done, guessed=(None,), wanted=(0,), idle_seconds=WAIT))
    assert policy.runs_ahead


def test_a_copy_that_was_not_verified_is_learnt_from() -> None:
    policy = CostModel()
    for right in (True, False):
        for _ in range(40):
            done = outcome((7,), (0,), (0,), score_seconds=PLAIN)
            policy.observe(replace(done, guessed=((5, right),), wanted=(0,)))
        rate = policy.describe()["acceptance"][5]["rate"]  # type: ignore[index]
        assert rate > 0.9 if right else rate < 0.6


def test_a_row_that_waits_for_long_lets_rounds_run_ahead() -> None:
    policy, ahead = OwnAcceptance(), []
    for _ in range(60):
        lengths = policy.lengths(view(7))
        ahead.append((policy.runs_ahead, lengths[0]))
        policy.observe(outcome((7,), lengths, (0,)))
    for (is_ahead, own), (_, following) in pairwise(ahead):
        assert is_ahead == (own == following == 0), "neither this round nor the next has a draft"
    assert {is_ahead for is_ahead, _ in ahead} == {True, False}
