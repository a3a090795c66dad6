"""A record as bars: milliseconds a token plainly, with drafts and by transformers, pair by pair."""

from __future__ import annotations

from pathlib import Path

from forerun.bench.seq2seq.record import DRAFTS, PLAIN, THEIRS, Seq2SeqRecord
from forerun.measure.plot import check_plot, save

TITLES = {THEIRS: "transformers", PLAIN: "plain", DRAFTS: "with drafts"}


def plot(record: Seq2SeqRecord, path: Path) -> None:
    """One cluster of bars a pair and batch; the scale is logarithmic, for transformers may be far above."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(TITLES)
    for place, (way, title) in enumerate(TITLES.items()):
        found = {(m.pair, m.batch): m.milliseconds_a_token for m in record.measurements if m.way == way}
        drawn = [(i, found[where]) for i, where in enumerate(record.places) if where in found]
        left = [i + (place - (len(TITLES) - 1) / 2) * width for i, _ in drawn]
        bars = axes.bar(left, [value for _, value in drawn], width, label=title)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(record.places)), [f"{pair}, batch {batch}" for pair, batch in record.places], fontsize=8)
    axes.set_ylabel("ms a token of a row")
    machine = record.provenance.machine
    axes.set_title(f"Decoding behind the encoder, {machine.gpu or machine.cpu}", fontsize=10)
    axes.legend(fontsize=8)
    save(figure, path)
