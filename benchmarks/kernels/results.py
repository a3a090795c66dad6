"""What was measured of the kernels, and the record it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

import torch

from benchmarks.kernels.cases import Case
from forerun.measure.plot import BLACK, GREY, RED, Figure, Panel, Series
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table
from forerun.measure.timing import Work, device_spans, wall_times

KIND = "kernels"
PROFILED, CALLS = 5, 20
DRAWN = "token, float32"


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call."""

    kernels: float  # the sum of the kernels' own times
    launches: float  # kernels, copies and fills
    wall: float  # until the host knows that it is done
    graph: float | None = None  # replayed from a CUDA graph; None where it cannot be captured


@dataclass(frozen=True, slots=True)
class Measurement:
    """One case."""

    case: Case
    ours: Times
    theirs: Times | None  # transformers' function, which takes one row
    divergence: float | None = None  # total variation from the target's law, of a lossy rule's tokens

    @property
    def own(self) -> float:
        return self.ours.kernels if self.ours.graph is None else self.ours.graph


@dataclass(frozen=True, slots=True)
class KernelResults:
    """A finished or interrupted run."""

    provenance: Provenance
    bytes_per_second: float  # of a copy, measured in the same run
    measurements: tuple[Measurement, ...]
    sweep: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # case -> change -> microseconds in a graph

    def floor(self, case: Case) -> float:
        """Microseconds that reading what must be read takes."""
        return 1e6 * case.must_read / self.bytes_per_second

    def record(self, complete: bool) -> Record:
        rows = [
            {"size": each.case.size, "name": each.case.name, "floor": self.floor(each.case), **asdict(each)}
            for each in self.measurements
        ]
        return Record(
            KIND,
            self.provenance,
            settings={},
            rows=rows,
            details={"bytes_per_second": self.bytes_per_second, "sweep": self.sweep},
            tables=_tables(self) if rows else (),
            remarks=_remarks(self, complete),
            figure=_figure(self) if rows else None,
            complete=complete,
        )


def times(work: Work, graph: float | None = None) -> Times:
    """`graph` is what replays took, before anything was profiled in this process."""
    wall = median(wall_times(work, CALLS, torch.device("cuda"), warm_up=3))
    spans = device_spans(lambda: [work() for _ in range(PROFILED)])
    return Times(1e6 * sum(end - start for start, end in spans) / PROFILED, len(spans) / PROFILED, 1e6 * wall, graph)


def _tables(results: KernelResults) -> tuple[Table, ...]:
    headings = (
        "vocabulary x rows", "what", "graph", "kernels", "launches", "wall", "floor", "of floor",
        "transformers: kernels", "launches", "wall",
    )  # fmt: skip
    rows = tuple(_row(results, each) for each in results.measurements)
    swept = (
        Table(f"Other tile sizes: {name}", ("change", "graph"), tuple((k, _us(v)) for k, v in changes.items()))
        for name, changes in results.sweep.items()
    )
    return (Table("Verification, logits to tokens: microseconds", headings, rows), *swept)


def _row(results: KernelResults, each: Measurement) -> tuple[str, ...]:
    ours, theirs, floor = each.ours, each.theirs, results.floor(each.case)
    other = (_us(theirs.kernels), f"{theirs.launches:.0f}", _us(theirs.wall)) if theirs else (NOTHING,) * 3
    what = each.case.name + ("" if each.divergence is None else f" (lossy: TV {each.divergence:.2f})")
    shown = (_us(ours.graph), _us(ours.kernels), f"{ours.launches:.0f}", _us(ours.wall))
    return (each.case.size, what, *shown, _us(floor), f"{each.own / floor:.2f}x", *other)


def _us(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _remarks(results: KernelResults, complete: bool) -> tuple[str, ...]:
    lines = (
        f"{results.provenance.machine.gpu}; floor: the logits that must be read, once, at "
        f"{results.bytes_per_second / 1e12:.2f} TB/s (a copy measured in the same run); logits that fit the cache can "
        "be read faster than that",
        "graph: 20 calls captured together; kernels: the sum of their own times; wall: with the host, call by call",
    )
    return lines if complete else (*lines, "Interrupted: these are the cases that were measured until then.")


def _figure(results: KernelResults) -> Figure | None:
    """The plain token rule over all sizes; the logarithmic axis says how far apart they are."""
    shown = [each for each in results.measurements if each.case.name == DRAWN]
    if not shown:
        return None
    places = tuple(map(float, range(len(shown))))
    theirs = [(place, each.theirs.kernels) for place, each in zip(places, shown, strict=True) if each.theirs]
    floors = tuple(results.floor(each.case) for each in shown)
    series = [
        Series("Forerun, graph replay", places, tuple(each.own for each in shown), "bars", RED, values="%.1f"),
        Series("floor: logits read once", places, floors, "points", BLACK, marker="_"),
    ]
    if theirs:
        x, y = zip(*theirs, strict=True)
        series.append(Series("transformers, kernels alone", x, y, "points", GREY, marker="s"))
    panel = Panel(
        "", "vocabulary x rows", "microseconds", tuple(series), places, tuple(each.case.size for each in shown),
        y_scale="log10",
    )  # fmt: skip
    title = f"Verification, float32 logits to tokens; {results.provenance.machine.gpu}"
    return Figure(title, (panel,), panel_size=(1.5 + 1.2 * len(shown), 4.5))
