"""What a plan leaves behind: everything that was measured, predicted and checked, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.records import content_of, damaged, provenance_of
from forerun.measure.provenance import Provenance
from forerun.plan.acceptance import Acceptance
from forerun.plan.check import LengthRun, PlanVerdict
from forerun.plan.costs import RoundCosts
from forerun.plan.predict import NOTHING_GAINED, Formula, Prediction

KIND = "plan"


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


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A finished or interrupted plan."""

    provenance: Provenance
    settings: Mapping[str, Any]
    operations: Mapping[str, float]  # by drafter: a draft step over a target step
    complete: bool
    acceptance: tuple[AcceptanceFacts, ...]
    costs: tuple[CostFacts, ...]
    plans: tuple[DrafterPlan, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...] = ()
    kind: str = KIND


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


def read(path: Path) -> PlanRecord:
    """A record from its file."""
    content = content_of(path)
    with damaged(path):
        known = {f.name: content[f.name] for f in fields(PlanRecord)}
        return PlanRecord(
            **known
            | {
                "provenance": provenance_of(content),
                "acceptance": tuple(_acceptance(entry) for entry in content["acceptance"]),
                "costs": tuple(_costs(entry) for entry in content["costs"]),
                "plans": tuple(_plan(entry) for entry in content["plans"]),
                "advice": tuple(Advice(**entry) for entry in content["advice"]),
                "notes": tuple(content["notes"]),
            }
        )


def _acceptance(entry: dict[str, Any]) -> AcceptanceFacts:
    survival = {length: tuple(chances) for length, chances in _by_length(entry["survival"]).items()}
    places = {name: tuple(entry[name]) for name in ("by_position", "reached")}
    return AcceptanceFacts(**entry | places | {"survival": survival})


def _costs(entry: dict[str, Any]) -> CostFacts:
    curves = {name: _by_length(entry[name]) for name in ("round_seconds", "draft_ratio", "score_ratio")}
    return CostFacts(**entry | curves)


def _plan(entry: dict[str, Any]) -> DrafterPlan:
    predictions = (Prediction(**p | {"formula": Formula(**p["formula"])}) for p in entry["predictions"])
    return DrafterPlan(
        **entry
        | {
            "predictions": tuple(predictions),
            "checked": tuple(LengthRun(**checked) for checked in entry["checked"]),
            "verdict": None if entry["verdict"] is None else PlanVerdict(**entry["verdict"]),
        }
    )


def _by_length(entries: Mapping[str, Any]) -> dict[int, Any]:
    """JSON knows no numbers as names."""
    return {int(length): value for length, value in entries.items()}


def summary(record: PlanRecord) -> dict[str, Any]:
    """Derived figures for people who read the file."""
    return {
        "advice": [asdict(entry) for entry in record.advice],
        "verdicts": [
            {
                "drafter": plan.drafter, "batch": plan.batch, "temperature": plan.temperature,
                "predicted_length": plan.verdict.predicted_length, "measured_length": plan.verdict.measured_length,
                "length_held": plan.verdict.length_held, "factor_error": plan.verdict.factor_error,
                "speed_error": plan.verdict.speed_error, "speed_held": plan.verdict.speed_held,
            }
            for plan in record.plans if plan.verdict is not None
        ],
    }  # fmt: skip
