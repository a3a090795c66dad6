"""A plan as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.measure.table import NOTHING, Table
from forerun.plan.check import SPEED_TOLERANCE, LengthRun
from forerun.plan.predict import Prediction
from forerun.plan.record import Advice, CostFacts, DrafterPlan, PlanRecord

SHOWN = (1, 2, 4, 8, 16, 32)  # draft lengths and places that get a column
BEST = " *"


def tables(record: PlanRecord) -> list[Table]:
    return [*_acceptance(record), *_costs(record), *(_plan(plan) for plan in record.plans)]


def remarks(record: PlanRecord) -> list[str]:
    """What the tables do not say."""
    lines = []
    if record.plans:
        lines += [
            f"{BEST.strip()} the predicted best. 'predicted' replays the counted rounds at the measured costs; "
            "'Leviathan' has one alpha and one c, and scores a whole draft for the price of one token.",
            "Speeds are those of rounds with every row in flight; reading the prompts is not in them.",
        ]
    lines += [f"Note: {note}." for note in record.notes]
    return lines if record.complete else [*lines, "Interrupted: this is what was known until then."]


def verdicts(record: PlanRecord) -> list[tuple[str, bool]]:
    """One sentence for every prediction that was checked, and whether it held."""
    return [
        (f"{_where(plan)}, {plan.drafter}: {_verdict(plan)}", plan.verdict.held)
        for plan in record.plans
        if plan.verdict is not None
    ]


def advice(record: PlanRecord) -> list[str]:
    return [_advice(entry) for entry in record.advice]


def _advice(entry: Advice) -> str:
    where = f"Batch {entry.batch}, temperature {entry.temperature:g}"
    how = "measured" if entry.measured else "predicted"
    if entry.drafter is None:
        return f"{where}: use no drafter. None of them makes decoding faster here ({how})."
    return f"{where}: use {entry.drafter} with drafts of {entry.length}, {entry.factor:.2f} times plain ({how})."


def _verdict(plan: DrafterPlan) -> str:
    verdict = plan.verdict
    assert verdict is not None
    if not verdict.predicted_length:
        outcome = "right" if verdict.length_held else f"wrong, drafts of {verdict.measured_length} gave"
        gain = "" if verdict.length_held else f" {verdict.best_factor:.2f} times plain"
        return f"predicted that no draft pays, {outcome}{gain}"
    missed = (
        "" if verdict.length_held else f" (MISSED: {verdict.measured_factor / verdict.best_factor:.0%} of its speed)"
    )
    length = f"best length {verdict.predicted_length} predicted, {verdict.measured_length} measured{missed}"
    speed = f"{verdict.predicted_factor:.2f} times plain predicted, {verdict.measured_factor:.2f} measured"
    held = "" if verdict.speed_held else f", MISSED: more than {SPEED_TOLERANCE:.0%}"
    return f"{length}; {speed} ({verdict.factor_error:+.1%}{held}; {verdict.speed_error:+.1%} in tokens per second)"


def _where(plan: DrafterPlan) -> str:
    return f"Batch {plan.batch}, temperature {plan.temperature:g}"


def _acceptance(record: PlanRecord) -> list[Table]:
    if not record.acceptance:
        return []
    longest = max(len(facts.by_position) for facts in record.acceptance)
    places = [place for place in range(1, longest + 1) if place <= 4 or place in SHOWN or place == longest]
    rows = [
        (
            f"{facts.drafter}, temperature {facts.temperature:g}",
            f"{facts.alpha:.2f}",
            *(_share(facts.by_position, place) for place in places),
            f"{facts.spoken:.0%}",
            str(facts.tokens),
        )
        for facts in record.acceptance
    ]
    headings = ("", "alpha", *(f"token {place}" for place in places), "drafts in", "tokens")
    return [Table("Chance that a drafted token is kept where it is reached", headings, tuple(rows))]


def _share(shares: Sequence[float | None], place: int) -> str:
    value = shares[place - 1] if place <= len(shares) else None
    return NOTHING if value is None else f"{value:.2f}"


def _costs(record: PlanRecord) -> list[Table]:
    if not record.costs:
        return []
    lengths = [n for n in SHOWN if n in record.costs[0].round_seconds]
    rows = [
        (
            f"{facts.drafter}, batch {facts.batch}, temperature {facts.temperature:g}, {_context(facts)}",
            f"{1000 * facts.plain_seconds:.1f}",
            *(f"{facts.draft_ratio[n]:.3f}" for n in lengths),
            *(f"{facts.score_ratio[n]:.2f}" for n in lengths),
        )
        for facts in record.costs
    ]
    headings = ("", "plain ms", *(f"c at {n}" for n in lengths), *(f"score {n}" for n in lengths))
    title = "Costs over a plain step: c of one draft step, by draft length; scoring and judging the whole draft"
    return [Table(title, headings, tuple(rows))]


def _context(facts: CostFacts) -> str:
    return f"{facts.context} keys" + ("" if facts.own_prompts else " (stretched prompts)")


def _plan(plan: DrafterPlan) -> Table:
    measured = {entry.length: entry for entry in plan.checked}
    rows = [_line(entry, measured.get(entry.length), entry.length == plan.best) for entry in plan.predictions]
    headings = ("draft length", "tokens a round", "times plain: predicted", "measured", "Leviathan",
                "operations", "Leviathan")  # fmt: skip
    return Table(f"{_where(plan)}: {plan.drafter}", headings, tuple(rows))


def _line(entry: Prediction, checked: LengthRun | None, is_best: bool) -> tuple[str, ...]:
    return (
        f"{entry.length}{BEST if is_best else ''}",
        f"{entry.tokens_per_round:.2f}",
        f"{entry.factor:.2f}",
        NOTHING if checked is None else f"{checked.factor:.2f}",
        f"{entry.formula.factor:.2f}",
        f"{entry.operations:.2f}",
        f"{entry.formula.operations:.2f}",
    )
