"""A comparison as a record: ratios to the baseline of the same run, and what stands behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, geometric_mean, median, stdev

from forerun.bench.results import Measurement, Results
from forerun.measure.plot import BLACK, BLUE, GREEN, GREY, ORANGE, PALE_BLUE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.reference import Agreement
from forerun.measure.table import NOTHING, Table
from forerun.rules import parse, warning

KIND = "decode"
REFUSES = "refuses"
OVERALL = "geometric mean"
PLAIN, RANDOM, DEFAULT = "forerun-plain", "forerun-random", "forerun"
COLOURS = {
    "lookup": GREY, "assisted": GREEN, PLAIN: PALE_BLUE, DEFAULT: RED, "forerun-draft": BLUE, RANDOM: ORANGE,
}  # fmt: skip


def make_record(results: Results, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(m) for m in results.measurements],
        details={
            "titles": results.titles, "refusals": [asdict(refusal) for refusal in results.refusals],
            "prompt_times": [asdict(each) for each in results.prompt_times],
            "memory": [asdict(each) for each in results.memory],
        },
        tables=tables(results) if results.measurements else (),
        remarks=remarks(results, complete),
        headline=headline(results),
        figure=figure(results) if results.measurements else None,
        complete=complete,
    )  # fmt: skip


def ratio(results: Results, method: str, batch: int, category: str, baseline: str | None = None) -> float | None:
    """How many times as fast as the baseline: the median over the groups that both decoded."""
    paired = ratios(results, method, batch, category, baseline)
    return median(paired) if paired else None


def ratios(results: Results, method: str, batch: int, category: str, baseline: str | None = None) -> list[float]:
    """One a group that both decoded. Tokens per second are compared, so that emitting too few gains nothing."""
    theirs = results.by_group(baseline or results.baseline, batch, category)
    ours = results.by_group(method, batch, category)
    return [ours[key].tokens_per_second / theirs[key].tokens_per_second for key in ours if key in theirs]


def overall(results: Results, method: str, batch: int, baseline: str | None = None) -> float | None:
    """Geometric mean of the categories' ratios: each counts the same, and 2x and 0.5x cancel out."""
    every = [ratio(results, method, batch, category, baseline) for category in results.categories()]
    known = [value for value in every if value is not None]
    return geometric_mean(known) if known else None


def tables(results: Results) -> tuple[Table, ...]:
    """Ratios by category for each batch size, then what stands behind them."""
    costs = (table for table in (_prompt_table(results), _memory_table(results)) if table.rows)
    return (*(_ratio_table(results, batch) for batch in results.batches()), _facts_table(results), *costs)


def figure(results: Results) -> Figure:
    """The overall ratios, one cluster of bars a batch size; the baseline is the line at 1."""
    series = []
    for method, title in results.titles.items():
        heights = [(float(i), overall(results, method, b), b) for i, b in enumerate(results.batches())]
        drawn = [(x, value, _error(results, method, b) * value) for x, value, b in heights if value is not None]
        if method != results.baseline and drawn:
            x, y, error = zip(*drawn, strict=True)
            series.append(Series(title, x, y, "bars", COLOURS.get(method), error=error, values="%.2f"))
    series.append(Series(results.titles[results.baseline], (0.0,), (1.0,), "level", BLACK))
    places = tuple(map(float, range(len(results.batches()))))
    panel = Panel(
        title="geometric mean of the categories; bars: two standard errors over the groups of prompts",
        x_label="",
        y_label=f"times as fast as {results.titles[results.baseline]}",
        series=tuple(series),
        x_ticks=places,
        x_names=tuple(f"batch {batch}" for batch in results.batches()),
    )
    return Figure(f"{results.settings['model']} on {results.provenance.machine.name}", (panel,), panel_size=(8, 4.2))


def _error(results: Results, method: str, batch: int) -> float:
    """Two standard errors of the mean log ratio over all groups: the relative error of a geometric mean."""
    logs = [math.log(r) for category in results.categories() for r in ratios(results, method, batch, category)]
    return 2 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def headline(results: Results) -> tuple[str, ...]:
    """The lines to read if one reads nothing else."""
    lines = []
    if DEFAULT in results.titles:
        speeds = [(batch, overall(results, DEFAULT, batch)) for batch in results.batches()]
        parts = [f"{_times(speed)} at batch {batch}" for batch, speed in speeds if speed is not None]
        if parts:
            lines.append(f"Forerun against {results.titles[results.baseline]}: {', '.join(parts)}")
    if RANDOM in results.titles and PLAIN in results.titles:
        costs = [(batch, overall(results, RANDOM, batch, baseline=PLAIN)) for batch in results.batches()]
        parts = [f"{1 / value - 1:+.1%} at batch {batch}" for batch, value in costs if value]
        if parts:
            lines.append(f"Time lost to useless drafts, against Forerun plain: {', '.join(parts)}")
    return tuple(lines)


def remarks(results: Results, complete: bool) -> tuple[str, ...]:
    """Where the numbers come from, and what to know before quoting them."""
    settings = results.settings
    lines = [
        results.provenance.sentence(),
        f"model {settings['model']}, {settings['max_new_tokens']} new tokens a prompt (end token ignored), "
        + (f"temperature {settings['temperature']}" if settings["temperature"] else "greedy")
        + f"; prompts: {settings['prompts']}",
    ]
    if (lossy := warning(parse(settings.get("rule", "token")))) is not None:
        lines.append(f"LOSSY: {lossy}. Speed bought so is no speed-up of the same text.")
    lines += [f"Refused: {results.titles[r.method]} at batch {r.batch} ({r.reason})." for r in results.refusals]
    lines += [f"Note: {note}." for note in results.notes]
    if not complete:
        lines.append("Interrupted: these are the groups that were measured until then.")
    return tuple(lines)


def _ratio_table(results: Results, batch: int) -> Table:
    title = f"Batch {batch}: times as fast as {results.titles[results.baseline]}"
    rows = [
        (
            category,
            *(_cell(results, method, batch, ratio(results, method, batch, category)) for method in results.titles),
        )
        for category in results.categories()
    ]
    last = (OVERALL, *(_cell(results, method, batch, overall(results, method, batch)) for method in results.titles))
    return Table(title, ("category", *results.titles.values()), (*rows, last), last_is_total=True)


def _facts_table(results: Results) -> Table:
    headings = ("method", "batch", "tokens/s", "tokens a round", "accepted", "repeated 4-grams", "same text")
    rows = [
        (title, str(batch), *_facts(results, method, batch))
        for batch in results.batches()
        for method, title in results.titles.items()
    ]
    return Table("What stands behind it", headings, tuple(rows))


def _prompt_table(results: Results) -> Table:
    """Medians without the first call of each, which is a warm-up."""
    lengths = sorted({each.tokens for each in results.prompt_times})

    def cell(method: str, length: int) -> str:
        times = [each.seconds for each in results.prompt_times if each.method == method and each.tokens == length]
        return f"{length / median(times[1:]):.0f}" if len(times) > 1 else NOTHING

    timed = {each.method for each in results.prompt_times}
    rows = [
        (results.titles[name], *(cell(name, length) for length in lengths)) for name in results.titles if name in timed
    ]
    headings = ("method", *(f"{length} tokens" for length in lengths))
    return Table("Prompts: tokens a second, with the first new one", headings, tuple(rows))


def _memory_table(results: Results) -> Table:
    rows = tuple((each.title, f"{each.peak_bytes / 2**20:.0f}") for each in results.memory)
    return Table("Memory: the most that a process of its own takes", ("method", "MiB"), rows)


def _facts(results: Results, method: str, batch: int) -> tuple[str, ...]:
    calls = results.of(method, batch)
    if not calls:
        return (REFUSES if results.refuses(method, batch) else NOTHING, *([NOTHING] * 4))
    agreements = [call.agreement for call in calls if call.agreement is not None]
    return (
        f"{median(call.tokens_per_second for call in calls):.1f}",
        f"{tokens_per_round(calls):.2f}",
        NOTHING if (rate := acceptance(calls)) is None else f"{rate:.0%}",
        f"{fmean(call.repeated for call in calls):.0%}",
        str(sum(agreements, Agreement(0, 0, 0))) if agreements else NOTHING,
    )


def tokens_per_round(calls: Sequence[Measurement]) -> float:
    rounds = sum(m.rounds for m in calls)
    return sum(m.new_tokens for m in calls) / rounds if rounds else 0.0


def acceptance(calls: Sequence[Measurement]) -> float | None:
    """Accepted / drafted; None where nothing is known or nothing was drafted."""
    drafted = sum(m.drafted or 0 for m in calls)
    return sum(m.accepted or 0 for m in calls) / drafted if drafted else None


def _cell(results: Results, method: str, batch: int, value: float | None) -> str:
    if results.refuses(method, batch):
        return REFUSES
    return _times(value)


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"
