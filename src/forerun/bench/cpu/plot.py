"""The curve: milliseconds over new tokens, one panel a batch size; matplotlib is only needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.cpu.record import CpuRecord
from forerun.bench.cpu.steps import KERNELS, MODULES, TRANSFORMERS
from forerun.measure.plot import check_plot, save

COLOURS = {TRANSFORMERS: "#8a8a8a", MODULES: "#3b75af", KERNELS: "#c1432e"}
MARKERS = {TRANSFORMERS: "s", MODULES: "^", KERNELS: "o"}


def plot(record: CpuRecord, path: Path) -> None:
    """Rows of panels are subjects, columns batch sizes; what no program can go below is shaded."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    subjects, batches = [s for s in record.work if record.ways(s)], record.batches()
    figure = Figure(figsize=(1 + 3.6 * len(batches), 0.9 + 3.1 * len(subjects)), layout="constrained")
    panels = figure.subplots(len(subjects), len(batches), squeeze=False)
    for row, subject in enumerate(subjects):
        for column, batch in enumerate(batches):
            _panel(record, subject, batch, panels[row][column])
            if column == 0:
                panels[row][column].set_ylabel(f"{subject}: ms a step")
            if row == len(subjects) - 1:
                panels[row][column].set_xlabel("new tokens a row")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = record.provenance.machine
    figure.suptitle(
        f"{record.settings['model']}, float32, {record.settings['past']} keys in the cache; "
        f"{machine.cpu}, {machine.threads} threads",
        fontsize=11,
    )
    save(figure, path)


def _panel(record: CpuRecord, subject: str, batch: int, axes: Any) -> None:
    tokens = record.tokens()
    for way in record.ways(subject):
        found = [(t, step) for t in tokens if (step := record.find(subject, way, batch, t)) is not None]
        xs, ys = [t for t, _ in found], [1000 * step.median for _, step in found]
        axes.plot(xs, ys, color=COLOURS[way], marker=MARKERS[way], markersize=5, label=record.titles[way])
        if way == KERNELS:
            for x, y in zip(xs, ys, strict=True):
                axes.annotate(f"{y:.0f}", (x, y), (5, -10), textcoords="offset points", ha="left", fontsize=8,
                              color=COLOURS[way])  # fmt: skip
    floor = [1000 * record.floor(subject, batch, t) for t in tokens]
    axes.fill_between(tokens, floor, color="#dddddd", label="below what the hardware allows")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.margins(x=0.1)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"batch {batch}", fontsize=10)
