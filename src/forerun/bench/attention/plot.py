"""Bars: what share of the copy bandwidth each form reads live keys at; matplotlib is only needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.attention.cases import SDPA
from forerun.bench.attention.record import AttentionRecord
from forerun.bench.attention.report import LEAST_SHARE
from forerun.math.attention import Form
from forerun.measure.plot import check_plot, save

COLOURS = {SDPA: "#8a8a8a", Form.PAD: "#9ec3e6", Form.SPLIT: "#3b75af", Form.KEYS: "#e8a33d", Form.AUTO: "#c1432e"}


def plot(record: AttentionRecord, path: Path) -> None:
    """Rows of panels are numbers of new tokens, columns kinds of heads."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    heads = list(dict.fromkeys((case.heads, case.key_heads) for case in record.cases()))
    queries = sorted({case.queries for case in record.cases()})
    figure = Figure(figsize=(1 + 6.2 * len(heads), 1.2 + 2.7 * len(queries)), layout="constrained")
    panels = figure.subplots(len(queries), len(heads), squeeze=False, sharey=True, sharex=True)
    for row, new in enumerate(queries):
        for column, kind in enumerate(heads):
            _panel(record, new, kind, panels[row][column])
            if column == 0:
                panels[row][column].set_ylabel(f"{new} new a row\nlive bytes read, of copy")
            if row == 0:
                panels[row][column].set_title(f"{kind[0]} query heads over {kind[1]} key heads", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    bandwidth = record.copy_bytes_per_second / 1e12
    figure.suptitle(f"{record.provenance.machine.gpu}, bfloat16; a copy reads and writes {bandwidth:.2f} TB/s")
    save(figure, path)


def _panel(record: AttentionRecord, queries: int, heads: tuple[int, int], axes: Any) -> None:
    cases = [c for c in record.cases() if c.queries == queries and (c.heads, c.key_heads) == heads]
    width = 0.8 / len(record.titles)
    for place, (way, title) in enumerate(record.titles.items()):
        found = [(i, timing) for i, case in enumerate(cases) if (timing := record.find(case, way)) is not None]
        xs = [i + (place - (len(record.titles) - 1) / 2) * width for i, _ in found]
        axes.bar(xs, [100 * record.share(t) for _, t in found], width, color=COLOURS[way], label=title)
    axes.axhline(100 * LEAST_SHARE, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(cases)), [_short(case) for case in cases], fontsize=8)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _short(case: Any) -> str:
    keys = f"{case.longest}" if case.shortest == case.longest else f"{case.shortest}..{case.longest}"
    return f"batch {case.batch}\n{keys}"
