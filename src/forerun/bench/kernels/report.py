"""The record of a run as tables."""

from __future__ import annotations

from typing import Any

from forerun.bench.kernels.record import KernelRecord, Measurement
from forerun.measure.table import NOTHING, Table


def tables(record: KernelRecord) -> list[Table]:
    headings = (
        "vocabulary x rows", "what", "graph", "kernels", "launches", "wall", "floor", "of floor",
        "transformers: kernels", "launches", "wall",
    )  # fmt: skip
    rows = tuple(_row(record, each) for each in record.measurements)
    found = [Table("Verification, logits to tokens: microseconds", headings, rows)]
    return [*found, *(_sweep(name, times) for name, times in record.sweep.items())]


def _row(record: KernelRecord, each: Measurement) -> tuple[str, ...]:
    ours, theirs, floor = each.ours, each.theirs, record.floor(each.case)
    own = ours.graph if ours.graph is not None else ours.kernels
    other = (_us(theirs.kernels), f"{theirs.launches:.0f}", _us(theirs.wall)) if theirs else (NOTHING,) * 3
    what = each.case.name + ("" if each.divergence is None else f" (lossy: TV {each.divergence:.2f})")
    shown = (_us(ours.graph), _us(ours.kernels), f"{ours.launches:.0f}", _us(ours.wall))
    return (each.case.size, what, *shown, _us(floor), f"{own / floor:.2f}x", *other)


def _sweep(name: str, times: Any) -> Table:
    return Table(f"Other tile sizes: {name}", ("change", "graph"), tuple((k, _us(v)) for k, v in times.items()))


def _us(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def remarks(record: KernelRecord) -> list[str]:
    machine = record.provenance.machine
    lines = [
        f"{machine.gpu}; floor: the logits that must be read, once, at {record.bytes_per_second / 1e12:.2f} TB/s (a "
        "copy measured in the same run); logits that fit the cache can be read faster than that",
        "graph: 20 calls captured together; kernels: the sum of their own times; wall: with the host, call by call",
    ]
    return lines if record.complete else [*lines, "Interrupted: these are the cases that were measured until then."]


def summary(record: KernelRecord) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    return {
        f"{each.case.size}: {each.case.name}": {
            "graph_us": each.ours.graph,
            "floor_us": record.floor(each.case),
            "bytes": each.case.must_read,
            "launches": each.ours.launches,
        }
        for each in record.measurements
    }
