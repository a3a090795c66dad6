"""What a plan finds out: acceptance, costs, predictions and what became of them, and the advice that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.plan.acceptance import Acceptance
from forerun.plan.check import LengthRun, PlanVerdict
from forerun.plan.costs import RoundCosts
from forerun.plan.predict import NOTHING_GAINED, Prediction


@dataclass(frozen=True, slots=True)
class AcceptanceFacts:
    """What a drafter got accepted at one temperature."""

    drafter: str
    temperature: float
    alpha: float  # kept / reached, over all lengths counted
    by_position: tuple[float | None, ...]  # the same for each place of the longest drafts; None where none was reached
    reached: tuple[int, ...]  # how many tokens that rests on
    survival: Mapping[int, tuple[float, ...]]  # by draft length: chance that a token and all before it were kept
    spoken: float  # share of rounds with a draft at all
    tokens: int  # decoded to find this out


@dataclass(frozen=True, slots=True)
class CostFacts:
    """What a drafter's rounds cost at one batch size, temperature and context."""

    drafter: str
    batch: int
    temperature: float
    context: int  # keys of a row, on average
    own_prompts: bool  # whether these are the prompts' own lengths, which predictions are made for
    plain_seconds: float
    round_seconds: Mapping[int, float]  # by draft length
    draft_ratio: Mapping[int, float]  # by draft length: Leviathan's c
    score_ratio: Mapping[int, float]  # by draft length: scoring full drafts over a plain step


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """One drafter at one batch size and temperature."""

    drafter: str
    batch: int
    temperature: float
    predictions: tuple[Prediction, ...]
    best: int  # draft length; 0 where plain decoding is best
    checked: tuple[LengthRun, ...] = ()
    verdict: PlanVerdict | None = None

    @property
    def predicted(self) -> Prediction:
        return next(entry for entry in self.predictions if entry.length == self.best)

    @property
    def factor(self) -> float:
        """Of the predicted length, as measured where it was."""
        return self.verdict.measured_factor if self.verdict else self.predicted.factor


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use at one batch size and temperature."""

    batch: int
    temperature: float
    drafter: str | None  # None: plain decoding
    length: int
    factor: float
    measured: bool


@dataclass(slots=True)
class PlanResults:
    """Everything that was measured, predicted and checked until now."""

    acceptance: list[AcceptanceFacts] = field(default_factory=list)
    costs: list[CostFacts] = field(default_factory=list)
    plans: list[DrafterPlan] = field(default_factory=list)
    complete: bool = False

    @property
    def advice(self) -> tuple[Advice, ...]:
        return advise(self.plans)


def acceptance_facts(drafter: str, temperature: float, found: Acceptance) -> AcceptanceFacts:
    places = found.longest.by_position()
    turns = [turn for trace in found.traces.values() for turn in trace.turns]
    return AcceptanceFacts(
        drafter=drafter,
        temperature=temperature,
        alpha=found.alpha,
        by_position=tuple(kept / reached if reached else None for kept, reached in places),
        reached=tuple(reached for _, reached in places),
        survival={length: tuple(trace.survival()) for length, trace in found.traces.items()},
        spoken=found.spoken,
        tokens=sum(turn.accepted + 1 for turn in turns),
    )


def cost_facts(drafter: str, temperature: float, context: int, own_prompts: bool, found: RoundCosts) -> CostFacts:
    lengths = list(found.whole)
    return CostFacts(
        drafter=drafter,
        batch=found.batch,
        temperature=temperature,
        context=context,
        own_prompts=own_prompts,
        plain_seconds=found.plain,
        round_seconds=dict(found.whole),
        draft_ratio={length: found.draft_ratio(length) for length in lengths},
        score_ratio={length: found.score_ratio(length) for length in lengths},
    )


def advise(plans: Sequence[DrafterPlan]) -> tuple[Advice, ...]:
    """The fastest drafter of each cell, as measured where it was; none where none is faster than plain decoding."""
    cells: dict[tuple[int, float], list[DrafterPlan]] = {}
    for plan in plans:
        cells.setdefault((plan.batch, plan.temperature), []).append(plan)
    return tuple(_advice(batch, temperature, found) for (batch, temperature), found in cells.items())


def _advice(batch: int, temperature: float, plans: Sequence[DrafterPlan]) -> Advice:
    top = max(plans, key=lambda plan: plan.factor)
    measured = top.verdict is not None
    if not top.best or top.factor <= NOTHING_GAINED:
        return Advice(batch, temperature, None, 0, 1.0, measured)
    return Advice(batch, temperature, top.drafter, top.best, top.factor, measured)
