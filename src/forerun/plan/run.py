"""The whole of it: count acceptance, time rounds, predict, check, advise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from forerun.plan.acceptance import CountedAcceptance, measure_acceptance
from forerun.plan.check import compare_with_runs, lengths_to_run, run_lengths
from forerun.plan.costs import RoundCosts, measure_costs
from forerun.plan.predict import best, predict
from forerun.plan.results import DrafterPlan, PlanResults
from forerun.plan.rounds import Prompt, PromptBatch, RoundRunner, prompt_batches
from forerun.plan.settings import CheckedLengths, PlanSettings

R = TypeVar("R")


def make_plan(
    plain: RoundRunner,
    drafters: Sequence[RoundRunner],
    prompts: Sequence[Prompt],
    settings: PlanSettings,
    reporter: Reporter,
    save: Callable[[PlanResults], R],
) -> R:
    """Give `save` what there is after every part; returns what it returned last. Ctrl-C ends it with what there is."""
    most = max(settings.batch_sizes)
    if len(prompts) < most:
        raise InvalidArgument(f"a batch of {most} needs as many prompts and there are {len(prompts)}; give more")
    parts = _Parts(plain, drafters, prompts, settings)

    def save_results(outcome: TurnsOutcome) -> R:
        parts.results.complete = outcome.complete
        return save(parts.results)

    return take_turns(parts.turns(), reporter, save_results)


class _Parts:
    """What is measured, one turn each; each adds to `results` what the next ones need."""

    def __init__(
        self, plain: RoundRunner, drafters: Sequence[RoundRunner], prompts: Sequence[Prompt], settings: PlanSettings
    ) -> None:
        self.plain, self.drafters, self.prompts, self.settings = plain, drafters, prompts, settings
        self.results = PlanResults({runner.name: runner.operations_ratio for runner in drafters})
        self.acceptance: dict[tuple[str, float], CountedAcceptance] = {}

    def turns(self) -> Iterator[Turn]:
        """Their costs are about the texts that are decoded."""
        settings = self.settings
        counting = len(self.prompts) * len(settings.counted)
        timing = (1 + settings.repeats) * settings.max_length * (1 + len(self.drafters)) / settings.max_new_tokens
        checking = len(self._prompts_to_check) * len(lengths_to_run(1, settings.max_length, settings.check))
        for temperature in settings.temperatures:
            for runner in self.drafters:
                title = f"counting what {runner.name} gets accepted at temperature {temperature:g}"
                yield Turn(title, partial(self.count, runner, temperature), counting)
            for batch in settings.batch_sizes:
                yield Turn(f"timing rounds at batch {batch}", partial(self.predict, batch, temperature), timing * batch)
                if settings.check is CheckedLengths.NONE:
                    continue
                for runner in self.drafters:
                    title = f"checking {runner.name} at batch {batch}"
                    yield Turn(title, partial(self.check, runner, batch, temperature), checking)
        for context in settings.contexts:
            batch = settings.batch_sizes[0]
            title = f"timing rounds at batch {batch}, {context} tokens of context"
            yield Turn(title, partial(self.time_context, context), timing * batch)

    def count(self, runner: RoundRunner, temperature: float) -> None:
        """Acceptance does not depend on the batch, so it is counted in the largest: that is the cheapest."""
        batches = self._batches(self.prompts, max(self.settings.batch_sizes), temperature)
        acceptance = measure_acceptance(runner, batches, self.settings.counted)
        self.acceptance[runner.name, temperature] = acceptance
        self.results.acceptance.append(acceptance)

    def predict(self, batch: int, temperature: float) -> None:
        """Time the rounds of all drafters, and predict the speed of each."""
        costs = self._time(self.prompts, batch, temperature)
        for runner in self.drafters:
            acceptance = self.acceptance[runner.name, temperature]
            predictions = predict(acceptance, costs[runner.name], self.settings.lengths, runner.operations_ratio)
            plan = DrafterPlan(runner.name, batch, temperature, tuple(predictions), best(predictions).length)
            self.results.plans.append(plan)

    def check(self, runner: RoundRunner, batch: int, temperature: float) -> None:
        """Run lengths around the predicted best, with other random numbers."""
        plans, settings = self.results.plans, self.settings
        cells = [(plan.drafter, plan.batch, plan.temperature) for plan in plans]
        place = cells.index((runner.name, batch, temperature))
        batches = self._batches(self._prompts_to_check, batch, temperature, settings.seed + 1)
        lengths = lengths_to_run(plans[place].best, settings.max_length, settings.check)
        checked = run_lengths(self.plain, runner, batches, lengths, settings.seed)
        verdict = compare_with_runs(plans[place].predicted, checked)
        plans[place] = replace(plans[place], checked=tuple(checked), verdict=verdict)

    def time_context(self, context: int) -> None:
        stretched = [stretch(prompt, context) for prompt in self.prompts]
        self._time(stretched, self.settings.batch_sizes[0], self.settings.temperatures[0], own_prompts=False)

    def _time(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, own_prompts: bool = True
    ) -> dict[str, RoundCosts]:
        settings, batches = self.settings, self._batches(prompts, batch, temperature)
        costs = measure_costs(
            self.plain, self.drafters, batches, settings.lengths, settings.repeats, settings.seed, own_prompts
        )
        self.results.costs += costs.values()
        return costs

    @property
    def _prompts_to_check(self) -> Sequence[Prompt]:
        return self.prompts[: self.settings.check_prompts]

    def _batches(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, seed: int | None = None
    ) -> list[PromptBatch]:
        settings = self.settings
        seed = settings.seed if seed is None else seed
        return prompt_batches(prompts, batch, settings.max_new_tokens, settings.max_length + 1, temperature, seed)


def stretch(prompt: Prompt, context: int) -> Prompt:
    """The prompt cut or repeated to a length: costs hardly depend on what it says."""
    return (prompt * -(-context // len(prompt)))[:context]
