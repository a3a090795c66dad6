"""The whole of it: count acceptance, time rounds, predict, check, advise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.plan.acceptance import Acceptance, measure_acceptance
from forerun.plan.check import judge, lengths_to_run, run_lengths
from forerun.plan.costs import RoundCosts, measure_costs
from forerun.plan.predict import best, predict
from forerun.plan.results import DrafterPlan, PlanResults, acceptance_facts, cost_facts
from forerun.plan.rounds import Prompt, PromptBatch, RoundRunner, prompt_batches
from forerun.plan.settings import Extent, PlanSettings


@dataclass(frozen=True, slots=True)
class Candidates:
    """Plain decoding, and the drafters that are compared."""

    plain: RoundRunner
    drafters: Sequence[RoundRunner]
    operations: Mapping[str, float]  # by drafter: a draft step over a target step


def make_plan(
    candidates: Candidates, prompts: Sequence[Prompt], settings: PlanSettings, reporter: Reporter
) -> PlanResults:
    """Ctrl-C ends it with what there is."""
    check_prompts(prompts, settings)
    found = PlanResults()
    try:
        _fill(found, candidates, prompts, settings, reporter)
        found.complete = True
    except KeyboardInterrupt:
        pass
    return found


def check_prompts(prompts: Sequence[Prompt], settings: PlanSettings) -> None:
    most = max(settings.batch_sizes)
    if len(prompts) < most:
        raise InvalidArgument(f"a batch of {most} needs as many prompts and there are {len(prompts)}; give more")


def _fill(
    found: PlanResults, candidates: Candidates, prompts: Sequence[Prompt], settings: PlanSettings, reporter: Reporter
) -> None:
    for temperature in settings.temperatures:
        accepted = _count(candidates, prompts, settings, temperature, reporter)
        found.acceptance += [acceptance_facts(name, temperature, entry) for name, entry in accepted.items()]
        for batch in settings.batch_sizes:
            _cell(found, candidates, prompts, settings, batch, temperature, accepted, reporter)
    for context in settings.contexts:
        stretched = [stretch(prompt, context) for prompt in prompts]
        _price(
            found, candidates, stretched, settings, settings.batch_sizes[0], settings.temperatures[0], reporter, False
        )


def stretch(prompt: Prompt, context: int) -> Prompt:
    """The prompt cut or repeated to a length: costs hardly depend on what it says."""
    return (prompt * -(-context // len(prompt)))[:context]


def _count(
    candidates: Candidates, prompts: Sequence[Prompt], settings: PlanSettings, temperature: float, reporter: Reporter
) -> dict[str, Acceptance]:
    """Acceptance does not depend on the batch, so it is counted in the largest: that is the cheapest."""
    batches = _batches(prompts, settings, max(settings.batch_sizes), temperature, settings.seed)
    accepted = {}
    for runner in candidates.drafters:
        what = f"counting what {runner.name} gets accepted at temperature {temperature:g}"
        reporter.start(what, len(batches) * len(settings.counted))
        accepted[runner.name] = measure_acceptance(runner, batches, settings.counted, reporter.advance)
    return accepted


def _price(
    found: PlanResults,
    candidates: Candidates,
    prompts: Sequence[Prompt],
    settings: PlanSettings,
    batch: int,
    temperature: float,
    reporter: Reporter,
    own_prompts: bool = True,
) -> dict[str, RoundCosts]:
    batches = _batches(prompts, settings, batch, temperature, settings.seed)
    context = round(fmean(map(len, prompts)) + settings.max_new_tokens / 2)
    reporter.start(
        f"timing rounds at batch {batch}, {context} tokens of context", (1 + settings.repeats) * settings.max_length
    )
    costs = measure_costs(
        candidates.plain,
        candidates.drafters,
        batches,
        settings.lengths,
        settings.repeats,
        settings.seed,
        reporter.advance,
    )
    found.costs += [cost_facts(name, temperature, context, own_prompts, entry) for name, entry in costs.items()]
    return costs


def _cell(
    found: PlanResults,
    candidates: Candidates,
    prompts: Sequence[Prompt],
    settings: PlanSettings,
    batch: int,
    temperature: float,
    accepted: Mapping[str, Acceptance],
    reporter: Reporter,
) -> None:
    """Price, predict and check all drafters at one batch size and temperature."""
    costs = _price(found, candidates, prompts, settings, batch, temperature, reporter)
    batches = _batches(prompts[: settings.check_prompts], settings, batch, temperature, settings.seed + 1)
    for runner in candidates.drafters:
        name = runner.name
        predictions = predict(accepted[name], costs[name], settings.lengths, candidates.operations[name])
        plan = DrafterPlan(name, batch, temperature, tuple(predictions), best(predictions).length)
        found.plans.append(plan)
        if settings.check is not Extent.NONE:
            found.plans[-1] = _checked(plan, candidates.plain, runner, batches, settings, reporter)


def _checked(
    plan: DrafterPlan,
    plain: RoundRunner,
    runner: RoundRunner,
    batches: Sequence[PromptBatch],
    settings: PlanSettings,
    reporter: Reporter,
) -> DrafterPlan:
    lengths = lengths_to_run(plan.best, settings.max_length, settings.check)
    reporter.start(f"checking {plan.drafter} at batch {plan.batch}", len(lengths) * len(batches))
    checked = run_lengths(plain, runner, batches, lengths, settings.seed, reporter.advance)
    verdict = judge(plan.predicted, checked)
    return DrafterPlan(plan.drafter, plan.batch, plan.temperature, plan.predictions, plan.best, tuple(checked), verdict)


def _batches(
    prompts: Sequence[Prompt], settings: PlanSettings, batch: int, temperature: float, seed: int
) -> list[PromptBatch]:
    return prompt_batches(prompts, batch, settings.max_new_tokens, settings.max_length + 1, temperature, seed)
