"""Drafts that the host finds, verified by recorded rounds: the tokens and the law of rounds step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from torch import Tensor

from engine.device_engines import CUT, GREEDY, SAMPLED, engine, finish, flown, rehearsing, requests, texts
from engine.following import Picky, Replayed
from exactness.sampling import PLAIN, PROMPT, verdict
from forerun import ops
from forerun.config import Kernels, SamplingParams
from forerun.drafters import Chain, DraftModel, PromptLookup
from forerun.engine import Engine, Request
from forerun.engine.device import round as device_round
from forerun.engine.device.choose import runner_of
from forerun.math.laws import PointMass
from forerun.models.scorer import Scorer
from forerun.policy import Constant, CostModel
from forerun.policy.heuristics import OwnAcceptance
from forerun.types import Draft, RoundOutcome, Rule
from support.markov import joint_law, toy_pair


def launched(made: Engine) -> list[tuple[int, int]]:
    """Of each round sent to the device from now on: how many were under way, and its longest draft."""
    assert made.runner is not None
    runner, seen, launch = made.runner, [], made.runner.launch

    def counted(rows: Any, lengths: Sequence[int], *rest: Any) -> None:
        seen.append((len(runner.pending), max(lengths)))
        launch(rows, lengths, *rest)

    runner.launch = counted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("params", "number"), [(SAMPLED, 2), (CUT, 5), (GREEDY, 3)])
@pytest.mark.quick("params0-2-token")
def test_same_tokens_where_rounds_without_a_copy_run_ahead(params: SamplingParams, number: int, rule: Rule) -> None:
    policy = Picky()
    made = engine(True, drafter="lookup", policy=policy, rule=rule)
    seen = launched(made)
    got = texts(made, requests(number, params, new=40))
    slow = engine(False, drafter="lookup", policy=Replayed(policy.drafted), rule=rule)
    assert got == texts(slow, requests(number, params, new=40))
    assert any(drafted for _, drafted in seen) and any(under_way for under_way, _ in seen)
    assert not any(under_way and drafted for under_way, drafted in seen), "no draft without the tokens before it"


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("params", "number"), [(SAMPLED, 5), (CUT, 4), (GREEDY, 3)])
@pytest.mark.slow
def test_same_tokens_where_rows_that_copy_are_beside_rows_that_are_drawn_for(
    params: SamplingParams, number: int, rule: Rule
) -> None:
    policy = Picky()
    made = engine(True, drafter="chain", policy=policy, rule=rule)
    seen = launched(made)
    got = texts(made, requests(number, params, new=40))
    slow = engine(False, drafter="chain", policy=Replayed(policy.drafted, policy.copied), rule=rule)
    assert got == texts(slow, requests(number, params, new=40))
    assert any(under_way and drafted for under_way, drafted in seen), "drawn drafts run ahead"
    columns = zip(policy.drafted.values(), policy.copied.values(), strict=True)
    kinds = {copy for lengths, copies in columns for length, copy in zip(lengths, copies, strict=True) if length}
    assert kinds == {True, False}


@pytest.mark.slow
def test_same_tokens_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: rows that copy and rows that are drawn for in one verification."""
    pytest.importorskip("support.triton_cpu")
    first, second = requests(2)
    copies = replace(first, prompt=(3, 4, 5, 3, 4, 5, 3), max_new_tokens=6)
    asked = [copies, replace(second, prompt=(3, *second.prompt), max_new_tokens=6)]
    want = texts(engine(False, drafter="chain", policy=2), asked)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: True)
    assert texts(engine(True, drafter="chain", policy=2), asked) == want


def test_a_fixed_length_never_goes_without_the_copy_it_would_have_had() -> None:
    made = engine(True, drafter="lookup", policy=3)
    seen = launched(made)
    assert texts(made, requests(3)) == texts(engine(False, drafter="lookup", policy=3), requests(3))
    assert not any(under_way for under_way, _ in seen)


def test_a_fixed_length_of_nothing_runs_ahead() -> None:
    made = engine(True, drafter="lookup", policy=0)
    seen = launched(made)
    assert texts(made, requests(3)) == texts(engine(False, drafter="none"), requests(3))
    assert any(under_way for under_way, _ in seen)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("drafter", ["lookup", "random", "doubting"])
def test_rounds_without_a_draft_run_ahead_behind_any_drafter(drafter: str) -> None:
    made = engine(True, drafter=drafter, policy=0)
    rounds = flown(made)
    assert texts(made, requests(3)) == texts(engine(False, drafter="none"), requests(3))
    assert rounds


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["lookup", "random"])
def test_lengths_without_a_clock_are_those_of_rounds_step_by_step(drafter: str) -> None:
    """Rounds are sent off early only where the policy's answer is certain."""
    asked = requests(1, new=90)
    want = texts(engine(False, drafter=drafter, policy=OwnAcceptance()), asked)
    made = engine(True, drafter=drafter, policy=OwnAcceptance())
    seen = launched(made)
    assert texts(made, asked) == want
    assert any(under_way for under_way, _ in seen)


class Heard(Picky):
    """Keeps what it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[RoundOutcome] = []

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(outcome)
        self.outcomes.append(outcome)


def test_what_became_of_copies_that_were_not_verified_is_told() -> None:
    policy = Heard()
    made = engine(True, drafter="lookup", policy=policy)
    (text,) = texts(made, requests(1, new=60)).values()
    said, right, wrong = 0, 0, 0
    for outcome in policy.outcomes:
        if outcome.guessed is not None and outcome.guessed[0] is not None:
            came_true = outcome.guessed[0][1]
            right, wrong = right + came_true, wrong + (not came_true)
            assert outcome.drafted[0] == 0 or came_true == (outcome.accepted[0] > 0)
            assert outcome.wanted is not None and outcome.wanted[0] >= outcome.drafted[0]
        said += outcome.accepted[0] + 1
    assert said >= len(text) and right and wrong
    assert any(outcome.idle_seconds == 0 for outcome in policy.outcomes)
    assert any(outcome.idle_seconds for outcome in policy.outcomes)


@pytest.mark.slow
def test_rows_that_come_stop_and_leave_while_rounds_run_ahead() -> None:
    asked = requests(6, new=30)
    plain = texts(engine(False, drafter="none"), asked[:1])[0]
    asked[0] = replace(asked[0], stop_ids=frozenset({plain[len(plain) // 2]}))
    policy = Picky()
    made = engine(True, drafter="lookup", policy=policy)
    handles = [made.add(request) for request in asked[:3]]
    while len(made.roster.running) < 3 or min(len(row.output) for row in made.roster.running.values()) < 3:
        made.step()
    for request in asked[3:]:
        made.add(request)
    made.abort(handles[1])
    got = finish(made)
    assert made.target.cache.rows == ()
    slow = engine(False, drafter="lookup", policy=Replayed(policy.drafted))
    slow.abort([slow.add(request) for request in asked][1])  # policies know rows by the order in which they came
    want = finish(slow)
    assert 0 == len(want.pop(1)) < len(got.pop(1)) < asked[1].max_new_tokens
    assert got == want


class Interrupted(Exception):
    """Whatever comes at a bad time."""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_an_interrupt_between_two_rounds_loses_nothing(error: type[BaseException], monkeypatch: Any) -> None:
    want = texts(engine(False, drafter="lookup", policy=3), requests(3))
    made = rehearsing(engine(True, drafter="lookup", policy=3))
    assert made.runner is not None
    for request in requests(3):
        made.add(request)
    made.step()
    made.step()
    collect, calls = made.runner.collect, []

    def failing() -> Any:
        calls.append(1)
        if len(calls) in (2, 5):
            raise error
        return collect()

    monkeypatch.setattr(made.runner, "collect", failing)
    while not made.is_idle:
        try:
            made.step()
        except (Interrupted, KeyboardInterrupt):
            assert not made.runner.has_pending
    assert {result.request.request_id: result.tokens for result in made.take_results()} == want


class BreaksItsWord(PromptLookup):
    """Says that it copies, and hands over a law of its own."""

    def propose(self, context: Any) -> Draft:
        return replace(super().propose(context), deterministic=False)


def test_a_drafter_that_does_not_copy_after_all_is_verified_step_by_step() -> None:
    found = []
    for on_device in (False, True):
        model_engine = engine(False, drafter="lookup", policy=3)
        made = Engine(model_engine.target, BreaksItsWord(max_ngram=1), Constant(3))
        if on_device:
            made.pair.runner = runner_of(made.target, made.drafter, Rule.TOKEN, made.clock)
        found.append(texts(made, requests(2)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_auto_says_what_plain_decoding_says() -> None:
    want = texts(engine(False, drafter="none"), requests(3, GREEDY, new=80))
    for drafter in ("lookup", "random"):
        assert texts(engine(True, drafter=drafter, policy=CostModel()), requests(3, GREEDY, new=80)) == want


NUMBER, ROWS, STEPS, VOCAB = 1536, 256, 3, 5


def samples(rule: Rule, draws: bool = False) -> list[tuple[int, ...]]:
    model, small = toy_pair(VOCAB)
    target, copier = Scorer(model, use=Kernels.OFF), PromptLookup(max_ngram=1)
    drafter = Chain(copier, DraftModel(small)) if draws else copier
    made = Engine(target, drafter, Picky(), rule=rule)
    made.pair.runner = runner_of(target, made.drafter, rule, made.clock)
    seen = launched(made)
    found: list[tuple[int, ...]] = []
    for start in range(0, NUMBER, ROWS):
        for i in range(start, start + ROWS):
            made.add(Request(prompt=PROMPT, max_new_tokens=6, params=PLAIN, seed=1, request_id=i))
        found += finish(made).values()
    assert any(drafted for _, drafted in seen)
    return found


@lru_cache
def law() -> Tensor:
    return joint_law(toy_pair(VOCAB)[0], PROMPT, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "draws"), [(rule, draws) for rule in Rule for draws in (False, True)])
def test_the_law_of_the_whole_loop(rule: Rule, draws: bool) -> None:
    assert not verdict(samples(rule, draws), law())


@pytest.mark.slow
def test_control_copies_taken_for_likely_draws_bend_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged as if most of the draft's mass lay elsewhere, copies would be kept too often."""

    class Lighter(PointMass):
        def of(self, tokens: Tensor) -> Tensor:
            return super().of(tokens) / 5

    monkeypatch.setattr(device_round, "PointMass", Lighter)
    assert verdict(samples(Rule.TOKEN), law())


@pytest.mark.slow
def test_control_copies_taken_for_drawn_bend_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that copy beside rows that are drawn for: each must be judged by its own law."""
    monkeypatch.setattr(device_round, "MixedLaw", lambda choice, laws: laws[0])
    assert verdict(samples(Rule.TOKEN, draws=True), law())
