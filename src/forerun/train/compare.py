"""Several runs side by side: a table, and acceptance by position as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.files import read_json
from forerun.loading.drafter_folder import DrafterManifest, load_drafter
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


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, the most tokens per round at the first temperature on top."""
    temperatures = list(dict.fromkeys(t for run in runs for t in run.temperatures))
    header = ["run", "kind", "loss", "steps"]
    for t in temperatures:
        header += [f"tokens/round T={t}", f"by position T={t}", f"repeated T={t}"]
    ordered = sorted(runs, key=lambda run: -run.tokens_per_round.get(temperatures[0], 0.0))
    return header, [_cells(run, temperatures) for run in ordered]


def _cells(run: Run, temperatures: Sequence[str]) -> list[str]:
    cells = [run.name, run.kind, run.loss, str(run.steps)]
    for t in temperatures:
        if t not in run.tokens_per_round:
            cells += ["-", "-", "-"]
            continue
        by_position = " ".join(f"{rate:.2f}" for rate in run.acceptance[t])
        cells += [f"{run.tokens_per_round[t]:.2f}", by_position, f"{run.repeated[t]:.0%}"]
    return cells


def draw_comparison(runs: Sequence[Run], path: Path) -> None:
    """One panel a temperature, one line a run."""
    from forerun.measure.plot import check_plot, save

    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    temperatures = list(dict.fromkeys(t for run in runs for t in run.temperatures))
    figure = Figure(figsize=(5 * len(temperatures), 4), layout="constrained")
    for place, axes in enumerate(figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]):
        t = temperatures[place]
        for run in runs:
            rates = run.acceptance.get(t, [])
            label = f"{run.name}: {run.kind}, {run.loss}"
            axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
        axes.set_title(f"temperature {t}", fontsize=10)
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[0].set_ylabel("kept where reached")
    figure.axes[0].legend(fontsize=7)
    save(figure, path)
