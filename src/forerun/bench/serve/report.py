"""Results as a record: throughput, latencies and drafts as tables, and a picture."""

from __future__ import annotations

from collections import Counter
from typing import Any

from forerun.bench.serve.load import LoadLevel
from forerun.bench.serve.results import (
    MEASURES,
    PERCENTILES,
    ServeResults,
    answered,
    goodput,
    percentile,
    requests_per_second,
    tokens_per_second,
    told_counts,
    values,
)
from forerun.bench.serve.samples import RequestSample
from forerun.measure.plot import BLACK, BLUE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "serve"
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
MEANINGS = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "whole answer"}
COLOURS = {"on": RED, "off": BLACK, None: BLUE}
DASHES = {50: "-", 99: ":"}
MILLI = 1000.0
MOST_ERRORS = 3


def make_record(results: ServeResults, complete: bool) -> Record:
    measured = bool(results.measured)
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[_row(level, sample) for level in results.levels for sample in level.samples],
        details={"counters": results.counters, "seconds": {level.name: level.seconds for level in results.levels}},
        tables=tables(results) if measured else (),
        remarks=remarks(results, complete),
        figure=figure(results) if measured else None,
        complete=complete,
    )


def tables(results: ServeResults) -> tuple[Table, ...]:
    every = (_throughput(results), _latency(results), _speculation(results))
    return tuple(table for table in every if table.rows)


def remarks(results: ServeResults, complete: bool) -> tuple[str, ...]:
    settings = results.settings
    shortest = settings.get("shortest_answer")
    new = f"{settings['max_new_tokens']}" if shortest is None else f"{shortest} to {settings['max_new_tokens']}"
    lines = [
        f"{settings['model']} at {settings['server']}, {settings['prompts']}, {new} new tokens, "
        f"temperature {settings['temperature']:g}; the client ran on {results.provenance.machine.name}, "
        f"{results.provenance.machine.cores} cores.",
        "Milliseconds as the client sees them: time to first token, time per output token after the first, inter-token "
        "latency (between chunks: drafts give several tokens a chunk, so it does not compare servers), whole answer.",
        *(f"Note: {note}." for note in (*results.notes, *_errors(results), *_disagreements(results))),
    ]
    if any(not sample.is_counted for level in results.levels for sample in answered(level)):
        lines.append("Note: the server tells no usage, so a chunk was counted as a token.")
    return tuple(lines if complete else [*lines, "Incomplete: these are the requests that were answered."])


def figure(results: ServeResults) -> Figure:
    """Latencies and throughput by load."""
    panels = [_panel(results, measure) for measure in ("ttft", "tpot", "e2e")]
    ticks, names = _ticks(results)
    speeds = tuple(
        Series(_mode(mode), *_points(results, mode, tokens_per_second), colour=COLOURS[mode])
        for mode in _modes(results)
    )
    panels.append(Panel("throughput", "load", "tokens a second", speeds, ticks, names))
    title = f"{results.settings['model']} at {results.settings['server']}"
    return Figure(title, tuple(panels), columns=2, panel_size=(5.6, 3.6))


def _panel(results: ServeResults, measure: str) -> Panel:
    ticks, names = _ticks(results)
    series = tuple(
        Series(
            f"{_mode(mode)}p{percent}",
            *_points(results, mode, lambda level, p=percent: MILLI * percentile(values(level, measure), p)),
            colour=COLOURS[mode],
            dashes=dashes,
        )
        for mode in _modes(results)
        for percent, dashes in DASHES.items()
    )
    return Panel(MEANINGS[measure], "load", "ms", series, ticks, names)


def _ticks(results: ServeResults) -> tuple[tuple[float, ...], tuple[str, ...]]:
    return tuple(map(float, range(len(results.loads)))), tuple(load.name for load in results.loads)


def _modes(results: ServeResults) -> list[str | None]:
    return list(dict.fromkeys(level.speculation for level in results.measured))


def _mode(mode: str | None) -> str:
    return "" if mode is None else f"drafts {mode} "


def _points(results: ServeResults, mode: str | None, value: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    levels = [level for level in results.measured if level.speculation == mode]
    return tuple(float(results.loads.index(level.load)) for level in levels), tuple(map(value, levels))


def _throughput(results: ServeResults) -> Table:
    headings = ["load", "answered", "refused", "failed", "seconds", "requests/s", "tokens/s"]
    rows = []
    for level in results.levels:
        good, refused = len(answered(level)), sum(sample.is_refused for sample in level.samples)
        failed = sum(sample.error is not None and not sample.is_refused for sample in level.samples)
        cells = [
            level.name, str(good), str(refused), str(failed), f"{level.seconds:.1f}",
            f"{requests_per_second(level):.2f}", f"{tokens_per_second(level):.1f}",
        ]  # fmt: skip
        if results.limits:
            cells.append(f"{goodput(level, results.limits):.2f}")
        rows.append(tuple(cells))
    if results.limits:
        headings.append("good requests/s")
    return Table("Requests and tokens", tuple(headings), tuple(rows))


def _latency(results: ServeResults) -> Table:
    """A row a level; of each measure the same percentiles."""
    headings = tuple(f"{NAMES[measure]} p{percent}" for measure in MEASURES for percent in PERCENTILES)
    rows = []
    for level in results.measured:
        cells = []
        for measure in MEASURES:
            numbers = values(level, measure)
            cells += [_milli(percentile(numbers, percent)) if numbers else NOTHING for percent in PERCENTILES]
        rows.append((level.name, *cells))
    return Table("Milliseconds", ("load", *headings), tuple(rows))


def _speculation(results: ServeResults) -> Table:
    headings = ("load", "drafted", "accepted", "share", "tokens a round", "told by")
    rows = []
    for level in results.measured:
        told, read = told_counts(level), results.counters.get(level.name)
        counts = told or read
        if counts is None:
            continue
        share = f"{counts.accepted / counts.drafted:.0%}" if counts.drafted else NOTHING
        if told is not None and told.rounds:
            per_round = f"{sum(sample.tokens for sample in answered(level)) / told.rounds:.2f}"
        else:  # of rounds with a draft, as vLLM counts its mean acceptance length
            per_round = f"{1 + counts.accepted / counts.rounds:.2f}" if counts.rounds else NOTHING
        source = "usage" if told is not None else "metrics"
        rows.append((level.name, str(counts.drafted), str(counts.accepted), share, per_round, source))
    return Table("Drafts", headings, tuple(rows))


def _errors(results: ServeResults) -> list[str]:
    """The most frequent ones in the server's own words."""
    errors = Counter(
        sample.error for level in results.levels for sample in level.samples if sample.error and not sample.is_refused
    )
    return [f"{number} requests failed: {error}" for error, number in errors.most_common(MOST_ERRORS)]


def _disagreements(results: ServeResults) -> list[str]:
    """Where usage and metrics differ, something is wrong, or somebody else was served, too."""
    disagreements = []
    for level in results.measured:
        told, read = told_counts(level), results.counters.get(level.name)
        if told is None or read is None or len(answered(level)) < len(level.samples):
            continue
        if (told.drafted, told.accepted) != (read.drafted, read.accepted):
            disagreements.append(
                f"at {level.name} the answers tell {told.accepted} of {told.drafted} drafted tokens accepted and the "
                f"server's metrics {read.accepted} of {read.drafted}: somebody else was served, too"
            )
    return disagreements


def _row(level: LoadLevel, sample: RequestSample) -> dict[str, Any]:
    return {
        "load": level.load.name,
        "speculation": level.speculation,
        "arrived": round(sample.arrived, 6),
        "ttft": sample.ttft,
        "tpot": sample.tpot,
        "e2e": sample.e2e,
        "longest_gap": max(sample.gaps, default=None),
        "prompt_tokens": sample.prompt_tokens,
        "tokens": sample.tokens,
        "counts": sample.counts,
        "error": sample.error,
    }


def _milli(seconds: float) -> str:
    value = MILLI * seconds
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
