"""Predictions against a machine whose costs and acceptance are known, and predictions that must be found wrong."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from forerun.errors import InvalidArgument
from forerun.math.theory import expected_tokens, walltime_factor
from forerun.measure.progress import Silent
from forerun.plan.check import LengthRun, compare_with_runs, lengths_to_run, run_lengths
from forerun.plan.costs import measure_costs
from forerun.plan.predict import LengthPrediction, best, predict
from forerun.plan.report import verdicts
from forerun.plan.results import DrafterPlan, PlanResults, advise
from forerun.plan.rounds import prompt_batches
from forerun.plan.run import make_plan
from forerun.plan.settings import CheckedLengths, PlanSettings
from plan.simulation import PLAIN, Simulated, even, patchy, plain, prompts

LONG = PlanSettings(max_new_tokens=400, check=CheckedLengths.ALL, repeats=12)


def found_with(*drafters: Simulated, settings: PlanSettings = LONG, count: int = 12) -> PlanResults:
    return make_plan(plain(), drafters, prompts(count), settings, Silent(), lambda results: results)


def errors(plan: DrafterPlan) -> dict[int, float]:
    """Predicted over measured, less 1, by draft length."""
    measured = {entry.length: entry.factor for entry in plan.checked}
    return {entry.length: entry.factor / measured[entry.length] - 1 for entry in plan.predictions}


def test_even_text_follows_leviathan() -> None:
    """With one alpha, and scoring that costs nothing more, replay and formula are one."""
    plan = found_with(Simulated("d", even(0.8), per_position=0.0)).plans[0]
    c = 0.002 / PLAIN
    for entry in plan.predictions[1:]:
        assert entry.tokens_per_round == pytest.approx(expected_tokens(0.8, entry.length), rel=0.03)
        assert entry.formula.tokens_per_round == pytest.approx(expected_tokens(0.8, entry.length), rel=0.02)
        assert entry.factor == pytest.approx(walltime_factor(0.8, entry.length, c), rel=0.04)
        assert entry.formula.factor == pytest.approx(entry.factor, rel=0.04)
        operations = (entry.length * 0.1 + entry.length + 1) / entry.tokens_per_round
        assert entry.operations == pytest.approx(operations, rel=1e-9)
    assert plan.verdict is not None
    assert plan.verdict.held


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_patchy_text_is_predicted_at_every_length(batch: int) -> None:
    """Lengths that were never counted (3, 5, 6, 7) included; the formula, for which scoring is free, misses."""
    plan = found_with(Simulated("d", patchy), settings=replace(LONG, batch_sizes=(batch,))).plans[0]
    assert [entry.length for entry in plan.predictions if not entry.counted] == [3, 5, 6, 7]
    assert max(map(abs, errors(plan).values())) < 0.06
    assert plan.verdict is not None
    assert plan.verdict.held
    last, checked = plan.predictions[-1], plan.checked[-1]
    true_tokens = checked.tokens / checked.rounds / batch
    assert last.tokens_per_round == pytest.approx(true_tokens, rel=0.06)
    assert last.formula.factor > 1.1 * checked.factor


def test_a_longer_trace_cut_short_would_be_wrong() -> None:
    """Why acceptance is counted at several lengths: rounds of long drafts begin at the hard places."""
    from forerun.plan.acceptance import measure_acceptance

    batches = prompt_batches(prompts(12), 1, 400, 9, 0.0, 0)
    traces = measure_acceptance(Simulated("d", patchy), batches, [1, 8]).traces
    assert traces[8].cut(1).survival()[0] < 0.9 * traces[1].survival()[0]


@pytest.mark.slow
def test_copies_that_do_not_fill_the_draft() -> None:
    lookup = Simulated(
        "lookup", even(0.7), copies=True, per_position=0.002, supply=lambda rng: rng.choice((0, 0, 2, 9))
    )
    for batch in (1, 4):
        plan = found_with(lookup, settings=replace(LONG, batch_sizes=(batch,))).plans[0]
        assert max(map(abs, errors(plan).values())) < 0.05
        assert plan.verdict is not None
        assert plan.verdict.held


def test_several_batches_and_temperatures_are_cells_of_their_own() -> None:
    found = found_with(
        Simulated("a", even(0.9)), Simulated("b", even(0.4)),
        settings=PlanSettings(batch_sizes=(1, 2), temperatures=(0.0, 1.0), contexts=(64,), check=CheckedLengths.NONE),
    )  # fmt: skip
    cells = [(plan.drafter, plan.batch, plan.temperature) for plan in found.plans]
    assert cells == [(d, b, t) for t in (0.0, 1.0) for b in (1, 2) for d in ("a", "b")]
    assert [(facts.context, facts.own_prompts) for facts in found.costs[-2:]] == [(64 + 20, False)] * 2
    assert {entry.drafter for entry in advise(found.plans)} == {"a"}
    assert found.complete


def test_drift_and_hiccups_are_survived() -> None:
    drafter = Simulated("d", even(0.8), hiccup=0.03)
    quiet = found_with(Simulated("d", even(0.8)), settings=replace(LONG, check=CheckedLengths.NONE)).plans[0]
    noisy = found_with(drafter, settings=replace(LONG, check=CheckedLengths.NONE)).plans[0]
    for a, b in zip(quiet.predictions, noisy.predictions, strict=True):
        assert b.factor == pytest.approx(a.factor, rel=0.04)


class Deceived:
    """Cheap while it is being timed, dear when it counts: what a benchmark of bare kernels would see."""

    def __init__(self, honest: Simulated, factor: float) -> None:
        self.name, self.cheap = honest.name, honest
        self.dear = replace(honest, per_draft=honest.per_draft * factor)

    def predictions(self) -> list[LengthPrediction]:
        from forerun.plan.acceptance import measure_acceptance

        batches = prompt_batches(prompts(12), 1, 400, 9, 0.0, 0)
        accepted = measure_acceptance(self.cheap, batches, (1, 2, 4, 8))
        costs = measure_costs(plain(), [self.cheap], batches, range(1, 9), 8)[self.name]
        return predict(accepted, costs, range(1, 9), 0.1)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("factor", "held"), [(1.0, True), (4.0, False)])
def test_a_wrong_c_is_caught(factor: float, held: bool) -> None:
    subject = Deceived(Simulated("d", even(0.8)), factor)
    predictions = subject.predictions()
    top = best(predictions)
    checked = run_lengths(plain(), subject.dear, prompt_batches(prompts(12), 1, 400, 9, 0.0, 1), range(9))
    verdict = compare_with_runs(top, checked)
    assert (verdict.speed_held, verdict.length_held) == (held, held)
    plan = DrafterPlan("d", 1, 0.0, tuple(predictions), top.length, tuple(checked), verdict)
    (sentence, good), = verdicts(PlanResults({"d": 0.1}, plans=[plan]))  # fmt: skip
    assert good is held
    assert ("MISSED" in sentence) is not held


@pytest.mark.slow
def test_plain_is_recommended_where_no_drafter_pays() -> None:
    found = found_with(Simulated("random", even(0.0)), Simulated("dear", even(0.5), per_draft=0.03))
    assert [plan.best for plan in found.plans] == [0, 0]
    assert [entry.length for entry in found.plans[0].checked] == list(range(9))
    (entry,) = advise(found.plans)
    assert (entry.drafter, entry.length, entry.factor, entry.measured) == (None, 0, 1.0, True)


@pytest.mark.slow
def test_the_faster_of_two_is_recommended_and_speed_counts_not_acceptance() -> None:
    found = found_with(Simulated("good", even(0.9), per_draft=0.012), Simulated("cheap", even(0.7), per_draft=0.0005))
    assert found.acceptance[0].alpha > found.acceptance[1].alpha
    (entry,) = advise(found.plans)
    assert entry.drafter == "cheap"
    assert entry.factor > 1.5


class TestJudging:
    def verdict(self, predicted: int, factors: dict[int, float], error: float = 0.0) -> Any:
        checked = [LengthRun(n, 100, 100, 1.0, factor, error) for n, factor in factors.items()]
        top: Any = type("P", (), {"length": predicted, "factor": factors[predicted], "tokens_per_second": 100.0})
        return compare_with_runs(top, checked)

    def advice(self, *cells: tuple[str, int, dict[int, float]], error: float = 0.0) -> tuple[str | None, int, float]:
        """Drafter, length and factor that are recommended where drafters were predicted and measured so."""
        plans = [
            DrafterPlan(name, 1, 0.0, (), predicted, (), self.verdict(predicted, factors, error))
            for name, predicted, factors in cells
        ]
        (entry,) = advise(plans)
        assert entry.measured
        return entry.drafter, entry.length, entry.factor

    def test_advice_follows_what_measured_fastest(self) -> None:
        assert self.advice(("d", 0, {0: 1.0, 1: 1.2, 2: 1.45})) == ("d", 2, 1.45)
        assert self.advice(("d", 2, {0: 1.0, 2: 1.3, 4: 1.6})) == ("d", 4, 1.6)
        assert self.advice(("d", 2, {0: 1.0, 1: 0.9, 2: 0.8})) == (None, 0, 1.0)

    def test_advice_keeps_to_the_predicted_length_within_noise(self) -> None:
        assert self.advice(("d", 0, {0: 1.0, 1: 1.025})) == (None, 0, 1.0)
        assert self.advice(("d", 2, {0: 1.0, 2: 1.58, 4: 1.6})) == ("d", 2, 1.58)
        assert self.advice(("d", 0, {0: 1.0, 2: 1.2}), error=0.1) == (None, 0, 1.0)

    def test_advice_compares_drafters_by_the_lengths_it_would_name(self) -> None:
        found = self.advice(("steady", 4, {0: 1.0, 4: 1.4}), ("surprising", 0, {0: 1.0, 2: 1.45}))
        assert found == ("surprising", 2, 1.45)

    def test_no_draft_is_not_near_a_draft_of_one(self) -> None:
        assert not self.verdict(0, {0: 1.0, 1: 1.45}).length_held
        assert not self.verdict(1, {0: 1.0, 1: 0.8}).length_held
        assert self.verdict(0, {0: 1.0, 1: 1.02}).length_held

    def test_within_one(self) -> None:
        assert self.verdict(4, {0: 1.0, 4: 1.5, 5: 2.0}).length_held

    def test_two_away_is_missed_unless_as_fast(self) -> None:
        assert not self.verdict(3, {0: 1.0, 3: 1.9, 5: 2.0}).length_held
        assert self.verdict(3, {0: 1.0, 3: 1.95, 5: 2.0}).length_held

    def test_sampled_text_may_differ_by_its_own_noise(self) -> None:
        assert self.verdict(3, {0: 1.0, 3: 1.9, 5: 2.0}, error=0.03).length_held
        assert not self.verdict(3, {0: 1.0, 3: 1.6, 5: 2.0}, error=0.03).length_held


def test_greedy_text_has_no_luck() -> None:
    """Its tokens are the same in every run, so only times count as noise; sampled text has more of it."""
    errors = {}
    for temperature in (0.0, 1.0):
        batches = prompt_batches(prompts(6), 1, 100, 9, temperature, 0)
        errors[temperature] = run_lengths(plain(), Simulated("d", noise=0.01), batches, [0, 4])[1].error
    assert errors[0.0] < 0.003
    assert errors[1.0] > 0.02


def test_which_lengths_are_run() -> None:
    assert lengths_to_run(4, 8, CheckedLengths.NEAR) == [0, 2, 3, 4, 5, 6]
    assert lengths_to_run(0, 8, CheckedLengths.NEAR) == [0, 1, 2]
    assert lengths_to_run(8, 8, CheckedLengths.NEAR) == [0, 6, 7, 8]
    assert lengths_to_run(1, 3, CheckedLengths.ALL) == [0, 1, 2, 3]
    assert lengths_to_run(1, 3, CheckedLengths.NONE) == []


def test_an_interrupt_leaves_what_there_is() -> None:
    class Impatient(Simulated):
        def rounds(self, batch: Any, choose: Any) -> Any:
            if batch.size == 2:
                raise KeyboardInterrupt
            return super().rounds(batch, choose)

    settings = PlanSettings(batch_sizes=(1, 2), check=CheckedLengths.NONE)
    saved: list[tuple[bool, int, int]] = []

    def save(results: PlanResults) -> PlanResults:
        saved.append((results.complete, len(results.acceptance), len(results.plans)))
        return results

    make_plan(plain(), [Impatient("d")], prompts(4), settings, Silent(), save)
    assert saved == [(False, 0, 0), (False, 0, 0)], "acceptance is counted in the largest batch, which interrupts"
    make_plan(plain(), [Simulated("d")], prompts(4), settings, Silent(), save)
    assert saved[2:] == [(False, 0, 0), (False, 1, 0), (False, 1, 1), (True, 1, 2)]


def test_costs_leave_no_batch_open() -> None:
    """Of an engine, others would decode beside its rows. The collector, which may come late, has no part in it."""

    class Counting(Simulated):
        open = 0

        def rounds(self, batch: Any, choose: Any) -> Any:
            self.open += 1
            assert self.open == 1
            try:
                yield from super().rounds(batch, choose)
            finally:
                self.open -= 1

    runners = Counting("plain", per_draft=0.0), Counting("d")
    batches = prompt_batches(prompts(4), 2, 20, 8, 1.0, 0)
    gc.disable()
    try:
        measure_costs(runners[0], runners[1:], batches, range(1, 5), 2)
    finally:
        gc.enable()
    assert [runner.open for runner in runners] == [0, 0]


@pytest.mark.parametrize(
    "bad",
    [{"max_length": 0}, {"max_length": 33}, {"max_new_tokens": 8}, {"batch_sizes": ()}, {"batch_sizes": (0,)},
     {"max_new_tokens": 3, "max_length": 1},
     {"temperatures": (-1.0,)}, {"contexts": (1,)}, {"repeats": 0}, {"check_prompts": 1, "batch_sizes": (2,)}],
)  # fmt: skip
def test_settings_that_cannot_be_measured_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        PlanSettings(**bad)


def test_too_few_prompts_for_the_batch_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="batch of 8"):
        found_with(Simulated("d"), settings=PlanSettings(batch_sizes=(8,)), count=4)
