"""The record of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from forerun.bench.kernels.record import KernelRecord
from forerun.measure.plot import check_plot, save


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
    save(figure, path)
