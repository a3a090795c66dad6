"""The record of a run as a picture; matplotlib is only needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.decode.methods import AUTO, BASS, FIXED, PLAIN
from forerun.bench.decode.record import DecodeRecord
from forerun.bench.decode.report import steady
from forerun.measure.plot import check_plot, save

COLOURS = {PLAIN: "#333333", BASS: "#3b75af", AUTO: "#c1432e"}
OTHERS = "#a0a0a0"
DASHES = dict(zip(FIXED, (":", "--", "-."), strict=True))


def plot(record: DecodeRecord, path: Path) -> None:
    """Latency by batch, BASS's picture of latency and utilisation, share of bandwidth, memory by draft length."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (latency, use), (bandwidth, memory) = figure.subplots(2, 2)
    for method in record.methods:
        _lines(record, method, latency, bandwidth, use)
    _finish_batches(record, latency, bandwidth)
    use.set(xlabel="ms a token of a row", ylabel="of a large product's FLOPS")
    use.set_title("latency and utilisation, a point a batch size", fontsize=10)
    use.yaxis.set_major_formatter("{x:.1f}%")
    _memory(record, memory)
    for axes in (latency, use, bandwidth, memory):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = record.provenance.machine
    figure.suptitle(f"{record.settings['pair']}, {machine.gpu or machine.cpu}", fontsize=11)
    save(figure, path, dpi=130)


def _lines(record: DecodeRecord, method: str, latency: Any, bandwidth: Any, use: Any) -> None:
    batches = [batch for batch in record.batches if record.calls(method, batch)]
    style = {"color": COLOURS.get(method, OTHERS), "linestyle": DASHES.get(method, "-"), "marker": "o", "markersize": 4}
    all_rows = [1000 * (steady(record, method, batch) or 0.0) for batch in batches]
    latency.plot(batches, all_rows, label=method, zorder=2 + (method in COLOURS), **style)
    if record.ceilings is not None:
        bandwidth.plot(batches, [100 * (record.read_share(method, b) or 0.0) for b in batches], **style)
        use.plot(all_rows, [100 * (record.utilisation(method, b) or 0.0) for b in batches], **style)


def _finish_batches(record: DecodeRecord, latency: Any, bandwidth: Any) -> None:
    latency.set(ylabel="ms a token of a row")
    latency.set_title("latency: the middle round over the tokens a round", fontsize=10)
    bandwidth.set(ylabel="of a linear layer's bandwidth")
    bandwidth.set_title("what must be read, over the time of the rounds", fontsize=10)
    bandwidth.yaxis.set_major_formatter("{x:.0f}%")
    for axes in (latency, bandwidth):
        axes.set_xscale("log", base=2)
        axes.set_xticks(record.batches, [str(batch) for batch in record.batches])
        axes.set_xlabel("batch")
        axes.set_ylim(bottom=0)


def _memory(record: DecodeRecord, axes: Any) -> None:
    if not record.memory:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "memory is measured on a GPU alone", ha="center", transform=axes.transAxes, color="grey")
        return
    axes.set(xlabel="draft length", ylabel="MiB beside weights and cache")
    for vocabulary in dict.fromkeys(each.vocabulary for each in record.memory):
        found = sorted((each.length, each.beside / 2**20) for each in record.memory if each.vocabulary == vocabulary)
        batch = next(each.batch for each in record.memory if each.vocabulary == vocabulary)
        axes.plot(*zip(*found, strict=True), marker="o", label=f"vocabulary {vocabulary}, batch {batch}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
