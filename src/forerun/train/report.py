"""What a draft was found to be worth: the evaluation of one run as a record, and several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import load_drafter
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record, load
from forerun.measure.table import NOTHING, Table

KIND = "train eval"
NAME = "eval.json"
"""The record's file in the folder of a run."""
ALL = "all"
"""The category of the rows that sum all prompts up."""


def evaluation_record(
    provenance: Provenance, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], details: Mapping[str, Any]
) -> Record:
    """`rows` hold, for each temperature, all prompts first and then their categories, where there are several."""
    overall = [row for row in rows if row["category"] == ALL]
    rates = {f"temperature {row['temperature']:g}": row["acceptance_by_position"] for row in overall}
    return Record(
        KIND,
        provenance,
        settings=settings,
        rows=rows,
        details=details,
        tables=tuple(_evaluation_table(rows, row["temperature"]) for row in overall),
        remarks=_remarks(provenance, settings, details),
        headline=(details["verdict"]["text"],) if "verdict" in details else (),
        figure=Figure("Acceptance of a trained draft by position", (_acceptance_panel("all prompts", rates),)),
    )


def _remarks(provenance: Provenance, settings: Mapping[str, Any], details: Mapping[str, Any]) -> tuple[str, ...]:
    lookup = ", behind prompt lookup" if settings["lookup"] else ""
    remarks = [
        f"{settings['draft']} on {settings['source']}: drafts of {settings['draft_length']}, at most "
        f"{settings['max_new_tokens']} new tokens a prompt{lookup}"
    ]
    if "costs" in details:
        *_, ratio = details["costs"]["draft_ratio"].values()  # of the longest drafts
        remarks.append(f"a draft step takes {ratio:.3f} of a target step")
    return (*remarks, provenance.sentence())


def _evaluation_table(rows: Sequence[Mapping[str, Any]], temperature: float) -> Table:
    """Categories, and all together at the end."""
    overall, *categories = (row for row in rows if row["temperature"] == temperature)
    headings = ("category", "prompts", "tokens/round", "kept by position", "repeated")
    lines = tuple((row["category"], str(row["prompts"]), *_figures(row)) for row in (*categories, overall))
    return Table(f"Held-out prompts at temperature {temperature:g}", headings, lines, last_is_total=True)


def _figures(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Tokens per round, acceptance by position, repeated 4-grams."""
    by_position = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
    return f"{row['tokens_per_round']:.2f}", by_position, f"{row['repeated_4grams']:.0%}"


def _acceptance_panel(title: str, rates: Mapping[str, Sequence[float]]) -> Panel:
    """One line for each label."""
    longest = max(map(len, rates.values()), default=0)
    positions = tuple(float(position) for position in range(1, longest + 1))
    series = tuple(Series(label, positions[: len(values)], tuple(values)) for label, values in rates.items())
    return Panel(title, "position in the draft", "kept where reached", series, x_ticks=positions)


@dataclass(frozen=True, slots=True)
class TrainRun:
    """What one run leaves to be compared by."""

    name: str
    kind: str
    loss: str
    steps: int
    tokens: int  # trained on
    by_temperature: dict[str, dict[str, Any]]  # the rows of its record that sum all prompts up


def read_run(folder: Path) -> TrainRun:
    """From the manifest and the evaluation a run left in its folder."""
    manifest = load_drafter(folder)[0]
    if not (folder / NAME).is_file():
        raise InvalidArgument(f"{str(folder)!r} has no {NAME}; make one with forerun train eval TARGET {folder.name}")
    rows = load(folder / NAME, KIND).rows
    training = manifest.provenance
    return TrainRun(
        name=folder.name,
        kind=manifest.kind,
        loss=str(training.get("options", {}).get("loss", "?")),
        steps=int(training.get("steps", 0)),
        tokens=int(training.get("tokens", 0)),
        by_temperature={f"{row['temperature']:g}": dict(row) for row in rows if row["category"] == ALL},
    )


def comparison_table(runs: Sequence[TrainRun]) -> Table:
    """The most tokens per round at the first temperature on top."""
    temperatures = _temperatures(runs)
    headings = ["run", "kind", "loss", "steps"]
    for t in temperatures:
        headings += [f"tokens/round T={t}", f"by position T={t}", f"repeated T={t}"]
    lines = []
    for run in sorted(runs, key=lambda run: -run.by_temperature.get(temperatures[0], {}).get("tokens_per_round", 0.0)):
        figures = [_figures(run.by_temperature[t]) if t in run.by_temperature else (NOTHING,) * 3 for t in temperatures]
        lines.append((run.name, run.kind, run.loss, str(run.steps), *(cell for cells in figures for cell in cells)))
    return Table("Trained drafts", tuple(headings), tuple(lines))


def comparison_figure(runs: Sequence[TrainRun]) -> Figure:
    """Acceptance by position: one panel a temperature, one line a run."""
    panels = tuple(
        _acceptance_panel(
            f"temperature {t}",
            {
                f"{run.name}: {run.kind}, {run.loss}": run.by_temperature[t]["acceptance_by_position"]
                for run in runs
                if t in run.by_temperature
            },
        )
        for t in _temperatures(runs)
    )
    return Figure("Acceptance of trained drafts by position", panels, columns=len(panels))


def _temperatures(runs: Sequence[TrainRun]) -> list[str]:
    return list(dict.fromkeys(t for run in runs for t in run.by_temperature))
