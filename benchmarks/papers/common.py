"""What all tables share: what was asked for, the record it leaves, where files lie, and how figures are written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from forerun.measure.plot import Figure, Panel
from forerun.measure.progress import Bar
from forerun.measure.provenance import Provenance, busy_note, provenance
from forerun.measure.record import Record, load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
PICTURES = ROOT / "docs" / "papers"
KIND = "paper table"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a table is made with."""

    pair: str = "embedded"  # or the name of a user's own pair, with its models
    target: str | None = None
    draft: str | None = None
    device: str | None = None
    quick: bool = False
    seed: int = 0

    def choose(self, full: Any, quick: Any) -> Any:
        """A limit for a real run, or for a look at whether everything works."""
        return quick if self.quick else full


def paper_record(
    origin: Provenance, table: str, settings: Mapping[str, Any], results: Mapping[str, Any], notes: Sequence[str] = ()
) -> Record:
    """One table, as measured once; `table` is the name of its command."""
    return Record(KIND, origin, {"table": table, **settings}, details=results, remarks=tuple(notes))


def record_path(table: str, pair: str | None = None, folder: Path = RESULTS) -> Path:
    return folder / f"{_stem(table, pair)}.json"


def picture_path(table: str, pair: str | None = None, folder: Path = PICTURES) -> Path:
    return folder / f"{_stem(table, pair)}.png"


def _stem(table: str, pair: str | None) -> str:
    return table if pair is None else f"{table}-{pair}"


def store(
    table: str,
    setup: Setup,
    device: Any,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    path: Path,
    timed: bool = True,
) -> Record:
    """Write what was measured, with everything one must know to trust or repeat it."""
    busy = busy_note("ended") if timed else None
    shown = {"pair": setup.pair, "quick": setup.quick, "seed": setup.seed, **settings}
    record = paper_record(provenance(device, command()), table, shown, results, [busy] if busy else [])
    record.save(path)
    return record


def command() -> list[str]:
    """As one would type it again."""
    return ["python", "-m", "benchmarks.papers", *sys.argv[1:]]


def paper_figure(title: str, record: Record, *panels: Panel) -> Figure:
    """Panels side by side under what they show and where it was measured."""
    return Figure(f"{title}; {place_of(record)}", panels, columns=len(panels), panel_size=(4.4, 3.6))


def read(path: Path) -> Record:
    return load(path, KIND)


class Steps:
    """How far a table is, and how long it will still take."""

    def __init__(self, total: int) -> None:
        from rich.console import Console

        self._bar = Bar(Console(stderr=True))
        self._bar.__enter__()
        self._bar.start("measuring", total)
        self._begun = False

    def step(self, what: str) -> None:
        """`what` begins; all steps before it are over."""
        if self._begun:
            self._bar.advance()
        self._bar.start(what)
        self._begun = True

    def end(self) -> None:
        self._bar.__exit__()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and the slow end of some timings."""
    return {
        "mean": fmean(values),
        "sd": stdev(values) if len(values) > 1 else 0.0,
        "p90": float(np.percentile(values, 90)),
        "p99": float(np.percentile(values, 99)),
        "count": len(values),
    }


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of text; the first column stands left, figures right."""
    rule = ["---", *("---:" for _ in headings[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]


def sentences(*parts: str) -> list[str]:
    """One paragraph; empty parts are left out."""
    return [" ".join(part for part in parts if part)]


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def ms(seconds: float, digits: int = 1) -> str:
    return f"{1000 * seconds:.{digits}f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def place_of(record: Record) -> str:
    """The machine, as a reader wants to know it."""
    machine = record.provenance.machine
    return machine.gpu or f"{machine.cpu}, {machine.threads} thread{'s' * (machine.threads != 1)}"
