"""Several runs side by side: a table, and acceptance by position as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.files import read_json
from forerun.loading.drafter_folder import DrafterManifest, load_drafter
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.table import Table
from forerun.train.evaluate import NAME


@dataclass(frozen=True, slots=True)
class Run:
    """What one run leaves to be compared by."""

    name: str
    kind: str
    loss: str
    steps: int
    tokens: int  # trained on
    tokens_per_round: dict[str, float]  # by temperature
    acceptance: dict[str, list[float]]  # by temperature, by position
    repeated: dict[str, float]  # share of repeated 4-grams, by temperature

    @property
    def temperatures(self) -> list[str]:
        return list(self.tokens_per_round)


def read_run(folder: Path) -> Run:
    """From the manifest and the evaluation a run left in its folder."""
    manifest = load_drafter(folder)[0]
    path = folder / NAME
    remedy = f"make one with forerun train eval TARGET {folder.name}"
    try:
        return _run(folder.name, manifest, read_json(path, remedy)["temperatures"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{str(path)!r} holds no evaluation ({error}); {remedy}") from error


def _run(name: str, manifest: DrafterManifest, found: dict[str, Any]) -> Run:
    made = manifest.provenance
    return Run(
        name=name,
        kind=manifest.kind,
        loss=str(made.get("options", {}).get("loss", "?")),
        steps=int(made.get("steps", 0)),
        tokens=int(made.get("tokens", 0)),
        tokens_per_round={t: entry["tokens_per_round"] for t, entry in found.items()},
        acceptance={t: entry["acceptance_by_position"] for t, entry in found.items()},
        repeated={t: entry["repeated_4grams"] for t, entry in found.items()},
    )


def comparison_table(runs: Sequence[Run]) -> Table:
    """The most tokens per round at the first temperature on top."""
    temperatures = _temperatures(runs)
    headings = ["run", "kind", "loss", "steps"]
    for t in temperatures:
        headings += [f"tokens/round T={t}", f"by position T={t}", f"repeated T={t}"]
    ordered = sorted(runs, key=lambda run: -run.tokens_per_round.get(temperatures[0], 0.0))
    return Table("Trained drafts", tuple(headings), tuple(tuple(_cells(run, temperatures)) for run in ordered))


def _temperatures(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(t for run in runs for t in run.temperatures))


def _cells(run: Run, temperatures: Sequence[str]) -> list[str]:
    cells = [run.name, run.kind, run.loss, str(run.steps)]
    for t in temperatures:
        if t not in run.tokens_per_round:
            cells += ["-", "-", "-"]
            continue
        by_position = " ".join(f"{rate:.2f}" for rate in run.acceptance[t])
        cells += [f"{run.tokens_per_round[t]:.2f}", by_position, f"{run.repeated[t]:.0%}"]
    return cells


def comparison_figure(runs: Sequence[Run]) -> Figure:
    """Acceptance by position: one panel a temperature, one line a run."""
    panels = tuple(_panel(t, runs) for t in _temperatures(runs))
    return Figure("Acceptance of trained drafts by position", panels, columns=len(panels))


def _panel(t: str, runs: Sequence[Run]) -> Panel:
    rates = {f"{run.name}: {run.kind}, {run.loss}": tuple(run.acceptance.get(t, [])) for run in runs}
    places = tuple(float(place) for place in range(1, max(map(len, rates.values())) + 1))
    series = tuple(Series(label, places[: len(values)], values) for label, values in rates.items())
    return Panel(f"temperature {t}", "position in the draft", "kept where reached", series, x_ticks=places)
