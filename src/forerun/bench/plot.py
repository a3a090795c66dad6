"""A record as a bar chart; matplotlib is only needed here."""

from __future__ import annotations

from pathlib import Path

from forerun.bench.records import Record
from forerun.bench.report import batches, overall
from forerun.measure.plot import check_plot, save


def plot(record: Record, path: Path) -> None:
    """The overall ratios, one cluster of bars a batch size; the baseline is the line at 1."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    methods = [method for method in record.titles if method != record.baseline]
    width = 0.8 / max(len(methods), 1)
    for place, method in enumerate(methods):
        found = [(i, overall(record, method, batch)) for i, batch in enumerate(batches(record))]
        drawn = [(i + (place - (len(methods) - 1) / 2) * width, value) for i, value in found if value is not None]
        bars = axes.bar([x for x, _ in drawn], [value for _, value in drawn], width, label=record.titles[method])
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(batches(record))), [f"batch {batch}" for batch in batches(record)])
    axes.set_ylabel(f"times as fast as {record.titles[record.baseline]}")
    axes.set_title(
        f"{record.settings['model']} on {record.provenance.machine.gpu or record.provenance.machine.cpu}", fontsize=10
    )
    axes.legend(fontsize=8)
    save(figure, path)
