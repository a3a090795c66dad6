"""The whole of it: count acceptance, time rounds, predict, check, advise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from forerun.errors import InvalidArgument
from forerun.plan.acceptance import Acceptance, measure_acceptance
from forerun.plan.check import judge, lengths_to_run, run_lengths
from forerun.plan.costs import Costs, measure_costs
from forerun.plan.predict import best, predict
from forerun.plan.record import AcceptanceFacts, CostFacts, Plan, acceptance_facts, cost_facts
from forerun.plan.rounds import Prober, Prompt, Task, tasks_of
from forerun.plan.settings import Extent, Settings


class Listener(Protocol):
    """Who shows the progress."""

    def starting(self, what: str, total: int | None = None) -> None: ...

    def advance(self) -> None: ...


@dataclass(slots=True)
class Findings:
    """What there is so far."""

    acceptance: list[AcceptanceFacts] = field(default_factory=list)
    costs: list[CostFacts] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Subjects:
    """Plain decoding, and the drafters that are compared."""

    plain: Prober
    drafters: Sequence[Prober]
    operations: Mapping[str, float]  # by drafter: a draft step over a target step


def make_plan(subjects: Subjects, prompts: Sequence[Prompt], settings: Settings, listener: Listener) -> Findings:
    """Ctrl-C ends it with what there is."""
    check_prompts(prompts, settings)
    found = Findings()
    try:
        _fill(found, subjects, prompts, settings, listener)
        found.complete = True
    except KeyboardInterrupt:
        pass
    return found


def check_prompts(prompts: Sequence[Prompt], settings: Settings) -> None:
    most = max(settings.batch_sizes)
    if len(prompts) < most:
        raise InvalidArgument(f"a batch of {most} needs as many prompts and there are {len(prompts)}; give more")


def _fill(
    found: Findings, subjects: Subjects, prompts: Sequence[Prompt], settings: Settings, listener: Listener
) -> None:
    for temperature in settings.temperatures:
        accepted = _count(subjects, prompts, settings, temperature, listener)
        found.acceptance += [acceptance_facts(name, temperature, entry) for name, entry in accepted.items()]
        for batch in settings.batch_sizes:
            _cell(found, subjects, prompts, settings, batch, temperature, accepted, listener)
    for context in settings.contexts:
        stretched = [stretch(prompt, context) for prompt in prompts]
        _price(found, subjects, stretched, settings, settings.batch_sizes[0], settings.temperatures[0], listener, False)


def stretch(prompt: Prompt, context: int) -> Prompt:
    """The prompt cut or repeated to a length: costs hardly depend on what it says."""
    return (prompt * -(-context // len(prompt)))[:context]


def _count(
    subjects: Subjects, prompts: Sequence[Prompt], settings: Settings, temperature: float, listener: Listener
) -> dict[str, Acceptance]:
    """Acceptance does not depend on the batch, so it is counted in the largest: that is the cheapest."""
    tasks = _tasks(prompts, settings, max(settings.batch_sizes), temperature, settings.seed)
    accepted = {}
    for prober in subjects.drafters:
        what = f"counting what {prober.name} gets accepted at temperature {temperature:g}"
        listener.starting(what, len(tasks) * len(settings.counted))
        accepted[prober.name] = measure_acceptance(prober, tasks, settings.counted, listener.advance)
    return accepted


def _price(
    found: Findings,
    subjects: Subjects,
    prompts: Sequence[Prompt],
    settings: Settings,
    batch: int,
    temperature: float,
    listener: Listener,
    own_prompts: bool = True,
) -> dict[str, Costs]:
    tasks = _tasks(prompts, settings, batch, temperature, settings.seed)
    context = round(fmean(map(len, prompts)) + settings.max_new_tokens / 2)
    listener.starting(
        f"timing rounds at batch {batch}, {context} tokens of context", (1 + settings.repeats) * settings.max_length
    )
    costs = measure_costs(
        subjects.plain, subjects.drafters, tasks, settings.lengths, settings.repeats, settings.seed, listener.advance
    )
    found.costs += [cost_facts(name, temperature, context, own_prompts, entry) for name, entry in costs.items()]
    return costs


def _cell(
    found: Findings,
    subjects: Subjects,
    prompts: Sequence[Prompt],
    settings: Settings,
    batch: int,
    temperature: float,
    accepted: Mapping[str, Acceptance],
    listener: Listener,
) -> None:
    """Price, predict and check all drafters at one batch size and temperature."""
    costs = _price(found, subjects, prompts, settings, batch, temperature, listener)
    tasks = _tasks(prompts[: settings.check_prompts], settings, batch, temperature, settings.seed + 1)
    for prober in subjects.drafters:
        name = prober.name
        predictions = predict(accepted[name], costs[name], settings.lengths, subjects.operations[name])
        plan = Plan(name, batch, temperature, tuple(predictions), best(predictions).length)
        found.plans.append(plan)
        if settings.check is not Extent.NONE:
            found.plans[-1] = _checked(plan, subjects.plain, prober, tasks, settings, listener)


def _checked(
    plan: Plan, plain: Prober, prober: Prober, tasks: Sequence[Task], settings: Settings, listener: Listener
) -> Plan:
    lengths = lengths_to_run(plan.best, settings.max_length, settings.check)
    listener.starting(f"checking {plan.drafter} at batch {plan.batch}", len(lengths) * len(tasks))
    checked = run_lengths(plain, prober, tasks, lengths, settings.seed, listener.advance)
    verdict = judge(plan.predicted, checked)
    return Plan(plan.drafter, plan.batch, plan.temperature, plan.predictions, plan.best, tuple(checked), verdict)


def _tasks(prompts: Sequence[Prompt], settings: Settings, batch: int, temperature: float, seed: int) -> list[Task]:
    return tasks_of(prompts, batch, settings.max_new_tokens, settings.max_length + 1, temperature, seed)
