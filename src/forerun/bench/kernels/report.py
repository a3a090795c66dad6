"""The record of a run as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.kernels.record import KernelRecord, Measurement
from forerun.bench.plot import check_plot
from forerun.bench.report import NOTHING, Table


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


def plot(record: KernelRecord, path: Path) -> None:
    """The plain token rule over all sizes: floor, ours, transformers; both axes say how far apart they are."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    shown = [each for each in record.measurements if each.case.name == "token, float32"]
    figure = Figure(figsize=(8, 0.8 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, each in enumerate(reversed(shown)):
        floor, own = record.floor(each.case), each.ours.graph or each.ours.kernels
        axes.barh(place, own, color="#c1432e", label="Forerun, graph replay" if not place else None)
        axes.plot([floor, floor], [place - 0.4, place + 0.4], color="black", label="floor" if not place else None)
        axes.annotate(f"{own:.1f}", (own, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    theirs = [(place, each.theirs) for place, each in enumerate(reversed(shown)) if each.theirs is not None]
    axes.scatter([t.kernels for _, t in theirs], [p for p, _ in theirs], color="#8a8a8a", marker="s",
                 label="transformers, kernels alone")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [each.case.size for each in reversed(shown)])
    axes.set_xlabel("microseconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Verification, float32 logits to tokens; {record.provenance.machine.gpu}", fontsize=11)
    figure.savefig(path, dpi=150)
