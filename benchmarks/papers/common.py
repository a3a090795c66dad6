"""What all tables share: what was asked for, the record it leaves, where files lie, and how figures are written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from forerun.bench.records import content_of, damaged, provenance_of, write
from forerun.errors import InvalidArgument
from forerun.measure.provenance import Provenance, busy_note, provenance

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
PICTURES = ROOT / "docs" / "papers"
KIND = "paper table"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a table is made with."""

    pair: str = "embedded"
    device: str | None = None
    quick: bool = False
    seed: int = 0

    def choose(self, full: Any, quick: Any) -> Any:
        """A limit for a real run, or for a look at whether everything works."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class PaperRecord:
    """One table, as measured once."""

    provenance: Provenance
    table: str  # the name of its command
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    kind: str = KIND

    @property
    def quick(self) -> bool:
        return bool(self.settings.get("quick"))


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
) -> PaperRecord:
    """Write what was measured, with everything one must know to trust or repeat it."""
    busy = busy_note("ended") if timed else None
    record = PaperRecord(
        provenance=provenance(device, command()),
        table=table,
        settings={"pair": setup.pair, "quick": setup.quick, "seed": setup.seed, **settings},
        results=results,
        notes=(busy,) if busy else (),
    )
    write(record, path)
    return record


def command() -> list[str]:
    """As one would type it again."""
    return ["python", "-m", "benchmarks.papers", *sys.argv[1:]]


def read(path: Path) -> PaperRecord:
    content = content_of(path)
    with damaged(path):
        if content["kind"] != KIND:
            raise InvalidArgument(f"{str(path)!r} is a record of kind {content['kind']!r}, not of a paper's table")
        known = {f.name: content[f.name] for f in fields(PaperRecord)}
        return PaperRecord(
            **known | {"provenance": provenance_of(content), "notes": tuple(content["notes"])},
        )


@dataclass(slots=True)
class Steps:
    """One line on the error stream that says how far a table is and how long it will still take."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.perf_counter)
    shown: bool = True

    def step(self, what: str) -> None:
        """`what` begins; all steps before it are over."""
        passed = time.perf_counter() - self.started
        left = f", {passed / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        self._show(f"{self.done + 1}/{self.total} {what} ({passed:.0f} s{left})")
        self.done += 1

    def end(self) -> None:
        self._show(f"{self.done} steps, {time.perf_counter() - self.started:.0f} s", "\n")

    def _show(self, line: str, end: str = "") -> None:
        if self.shown:
            print(f"\r\033[K{line}", end=end, file=sys.stderr, flush=True)


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


def place_of(record: PaperRecord) -> str:
    """The machine, as a reader wants to know it."""
    machine = record.provenance.machine
    return machine.gpu or f"{machine.cpu}, {machine.threads} thread{'s' * (machine.threads != 1)}"
