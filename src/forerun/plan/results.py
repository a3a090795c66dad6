"""What a plan finds out: acceptance, costs, predictions and what became of them, and the advice that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.plan.acceptance import CountedAcceptance
from forerun.plan.check import LengthRun, PlanVerdict
from forerun.plan.costs import RoundCosts
from forerun.plan.predict import NOTHING_GAINED, LengthPrediction


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """One drafter at one batch size and temperature."""

    drafter: str
    batch: int
    temperature: float
    predictions: tuple[LengthPrediction, ...]
    best: int  # draft length; 0 where plain decoding is best
    checked: tuple[LengthRun, ...] = ()
    verdict: PlanVerdict | None = None

    @property
    def predicted(self) -> LengthPrediction:
        return next(entry for entry in self.predictions if entry.length == self.best)

    @property
    def length(self) -> int:
        """To be used: the one that measured fastest; the predicted one where none was run or it was as fast."""
        return self.best if self.verdict is None or self.verdict.is_tie else self.verdict.measured_length

    @property
    def factor(self) -> float:
        """Of `length`, as measured where it was."""
        if self.verdict is None:
            return self.predicted.factor
        return self.verdict.measured_factor if self.verdict.is_tie else self.verdict.best_factor


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

    operations: Mapping[str, float]  # of each drafter, the arithmetic of a draft step over that of a target step
    acceptance: list[CountedAcceptance] = field(default_factory=list)
    costs: list[RoundCosts] = field(default_factory=list)
    plans: list[DrafterPlan] = field(default_factory=list)
    complete: bool = False


def advise(plans: Sequence[DrafterPlan]) -> tuple[Advice, ...]:
    """The fastest drafter of each batch size and temperature, as measured where it was; none where none is faster than
    plain decoding."""
    cells: dict[tuple[int, float], list[DrafterPlan]] = {}
    for plan in plans:
        cells.setdefault((plan.batch, plan.temperature), []).append(plan)
    advice = []
    for (batch, temperature), compared in cells.items():
        top = max(compared, key=lambda plan: plan.factor)
        measured = top.verdict is not None
        if top.length > 0 and top.factor > NOTHING_GAINED:
            advice.append(Advice(batch, temperature, top.drafter, top.length, top.factor, measured))
        else:
            advice.append(Advice(batch, temperature, None, 0, 1.0, measured))
    return tuple(advice)
