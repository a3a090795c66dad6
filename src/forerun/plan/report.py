"""A plan as a record: its tables, its sentences and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table
from forerun.plan.check import SPEED_TOLERANCE, LengthRun
from forerun.plan.plot import figure
from forerun.plan.predict import LengthPrediction
from forerun.plan.results import Advice, DrafterPlan, PlanResults, advise

SHOWN = (1, 2, 4, 8, 16, 32)  # draft lengths and places that get a column
BEST = " *"


def plan_record(
    provenance: Provenance,
    settings: Mapping[str, Any],
    results: PlanResults,
    notes: Sequence[str] = (),
) -> Record:
    advice = advise(results.plans)
    acceptance = [entry.facts() for entry in results.acceptance]
    costs = [entry.facts() for entry in results.costs]
    return Record(
        kind="plan",
        provenance=provenance,
        settings=settings,
        rows=[_row(plan) for plan in results.plans],
        details={
            "operations": results.operations,
            "acceptance": acceptance,
            "costs": costs,
            "advice": advice,
            "notes": tuple(notes),
        },
        tables=(*_acceptance(acceptance), *_costs(costs), *(_plan(plan) for plan in results.plans)),
        remarks=tuple(_remarks(results, notes)),
        headline=(*(line for line, _ in verdicts(results)), *(_advice(entry) for entry in advice)),
        figure=figure(f"{settings['target']} on {provenance.machine.name}", results),
        complete=results.complete,
    )


def _row(plan: DrafterPlan) -> dict[str, Any]:
    """The plan, with what follows from its verdict, for people who read the file."""
    row = asdict(plan)
    if plan.verdict is not None:
        names = ("length_held", "factor_error", "speed_error", "speed_held")
        row["verdict"] |= {name: getattr(plan.verdict, name) for name in names}
    return row


def _remarks(results: PlanResults, notes: Sequence[str]) -> list[str]:
    """What the tables do not say."""
    lines = []
    if results.plans:
        lines += [
            f"{BEST.strip()} the predicted best. 'predicted' replays the counted rounds at the measured costs; "
            "'Leviathan' has one alpha and one c, and scores a whole draft for the price of one token.",
            "Speeds are those of rounds with every row in flight; reading the prompts is not in them.",
        ]
    lines += [f"Note: {note}." for note in notes]
    return lines if results.complete else [*lines, "Interrupted: this is what was known until then."]


def verdicts(results: PlanResults) -> list[tuple[str, bool]]:
    """One sentence for every prediction that was checked, and whether it held."""
    return [
        (f"{_where(plan)}, {plan.drafter}: {_verdict(plan)}", plan.verdict.held)
        for plan in results.plans
        if plan.verdict is not None
    ]


def _advice(entry: Advice) -> str:
    where = f"Batch {entry.batch}, temperature {entry.temperature:g}"
    how = "measured" if entry.measured else "predicted"
    if entry.drafter is None:
        seen = " by more than chance" if entry.measured else ""
        return f"{where}: use no drafter. None of them makes decoding faster here{seen} ({how})."
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


def _acceptance(entries: Sequence[Mapping[str, Any]]) -> list[Table]:
    if not entries:
        return []
    longest = max(len(entry["by_position"]) for entry in entries)
    places = [place for place in range(1, longest + 1) if place <= 4 or place in SHOWN or place == longest]
    rows = [
        (
            f"{entry['drafter']}, temperature {entry['temperature']:g}",
            f"{entry['alpha']:.2f}",
            *(NOTHING if (kept := entry["by_position"][place - 1]) is None else f"{kept:.2f}" for place in places),
            f"{entry['spoken']:.0%}",
            str(entry["tokens"]),
        )
        for entry in entries
    ]
    headings = ("", "alpha", *(f"token {place}" for place in places), "drafts in", "tokens")
    return [Table("Chance that a drafted token is kept where it is reached", headings, tuple(rows))]


def _costs(entries: Sequence[Mapping[str, Any]]) -> list[Table]:
    if not entries:
        return []
    lengths = [n for n in SHOWN if n in entries[0]["round_seconds"]]
    rows = [
        (
            f"{entry['drafter']}, batch {entry['batch']}, temperature {entry['temperature']:g}, "
            f"{entry['context']} keys" + ("" if entry["own_prompts"] else " (stretched prompts)"),
            f"{1000 * entry['plain_seconds']:.1f}",
            *(f"{entry['draft_ratio'][n]:.3f}" for n in lengths),
            *(f"{entry['score_ratio'][n]:.2f}" for n in lengths),
        )
        for entry in entries
    ]
    headings = ("", "plain ms", *(f"c at {n}" for n in lengths), *(f"score {n}" for n in lengths))
    title = "Costs over a plain step: c of one draft step, by draft length; scoring and verifying the whole draft"
    return [Table(title, headings, tuple(rows))]


def _plan(plan: DrafterPlan) -> Table:
    measured = {entry.length: entry for entry in plan.checked}
    rows = [_line(entry, measured.get(entry.length), entry.length == plan.best) for entry in plan.predictions]
    headings = ("draft length", "tokens a round", "times plain: predicted", "measured", "Leviathan",
                "operations", "Leviathan")  # fmt: skip
    return Table(f"{_where(plan)}: {plan.drafter}", headings, tuple(rows))


def _line(entry: LengthPrediction, checked: LengthRun | None, is_best: bool) -> tuple[str, ...]:
    return (
        f"{entry.length}{BEST if is_best else ''}",
        f"{entry.tokens_per_round:.2f}",
        f"{entry.factor:.2f}",
        NOTHING if checked is None else f"{checked.factor:.2f}",
        f"{entry.formula.factor:.2f}",
        f"{entry.operations:.2f}",
        f"{entry.formula.operations:.2f}",
    )
