"""Results as a record: latencies, rounds, passes, memory and peers as tables, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from statistics import quantiles, stdev
from typing import Any

from forerun.bench.decode.calls import Call
from forerun.bench.decode.forward import Forward
from forerun.bench.decode.methods import AUTO, BASS, FIXED, PLAIN
from forerun.bench.decode.results import DecodeResults
from forerun.measure.plot import BLACK, BLUE, COLOURS, GREY, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "decode rounds"
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"colour": BLACK},
    BASS: {"colour": BLUE},
    AUTO: {"colour": RED},
    **{name: {"colour": GREY, "dashes": dashes} for name, dashes in zip(FIXED, (":", "--", "-."), strict=True)},
}
LATENCIES = ("first", "last", "all")


def make_record(results: DecodeResults, complete: bool) -> Record:
    details = {
        name: getattr(results, name)
        for name in ("target", "draft", "ceilings", "alpha", "forward", "startups", "device_times", "memory", "peers")
    }
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(call) for call in results.calls_made],
        details=details,
        tables=tables(results),
        remarks=remarks(results, complete),
        figure=figure(results) if results.calls_made else None,
        complete=complete,
    )


def tables(results: DecodeResults) -> tuple[Table, ...]:
    found = [_latency(results), _rounds(results)]
    found += [_forward(results.forward)] if results.forward is not None else []
    found += [_device(results)] if results.device_times else []
    found += [_memory(results)] if results.memory else []
    found += [_peers(results)] if results.peers else []
    return tuple(table for table in found if table.rows)


def remarks(results: DecodeResults, complete: bool) -> tuple[str, ...]:
    lines = [_where(results), *_ceilings(results), *_startup(results), *_captures(results)]
    lines += [f"Note: {note}." for note in results.notes]
    return tuple(lines if complete else [*lines, "Incomplete: these are the parts that were measured."])


def figure(results: DecodeResults) -> Figure:
    """Latency by batch, BASS's picture of latency and utilisation, share of bandwidth, memory by draft length."""
    batches = tuple(map(float, results.batches))
    latency, use, bandwidth = [], [], []
    for method in results.methods:
        own = [batch for batch in results.batches if results.calls(method, batch)]
        x, style = tuple(map(float, own)), STYLES.get(method, {})
        times = tuple(1000 * (steady(results, method, batch) or 0.0) for batch in own)
        error = tuple(1000 * _spread(results.calls(method, batch)) for batch in own)
        latency.append(Series(method, x, times, error=error, **style))
        if results.ceilings is not None:
            used = tuple(100 * (results.utilisation(method, batch) or 0.0) for batch in own)
            read = tuple(100 * (results.read_share(method, batch) or 0.0) for batch in own)
            use.append(Series(method, times, used, **style))
            bandwidth.append(Series(method, x, read, **style))
    panels = [
        Panel("the middle round over the tokens a round; bars: one standard deviation of the calls", "batch",
              "ms a token of a row", tuple(latency), batches, x_scale="log"),
        Panel("latency and utilisation, a point a batch size", "ms a token of a row", "of a large product's FLOPS",
              tuple(use), y_format="{x:.1f}%"),
        Panel("what must be read, over the time of the rounds", "batch", "of a linear layer's bandwidth",
              tuple(bandwidth), batches, x_scale="log", y_format="{x:.0f}%"),
        _memory_panel(results),
    ]  # fmt: skip
    title = f"{results.settings['pair']}, {results.provenance.machine.name}"
    return Figure(title, tuple(panel for panel in panels if panel.series), columns=2, panel_size=(5.6, 3.6))


def _memory_panel(results: DecodeResults) -> Panel:
    """Empty on a CPU."""
    series = []
    for place, vocabulary in enumerate(dict.fromkeys(each.vocabulary for each in results.memory)):
        own = sorted((each for each in results.memory if each.vocabulary == vocabulary), key=lambda each: each.length)
        label = f"vocabulary {vocabulary}, batch {own[0].batch}"
        x, y = tuple(float(each.length) for each in own), tuple(each.beside / 2**20 for each in own)
        series.append(Series(label, x, y, colour=COLOURS[place]))
    lengths = tuple(float(length) for length in sorted({each.length for each in results.memory}))
    return Panel("memory", "draft length", "MiB beside weights and cache", tuple(series), lengths)


def _spread(calls: list[Call]) -> float:
    """Of seconds a token, call by call."""
    found = [call.seconds / call.tokens * call.batch for call in calls]
    return stdev(found) if len(found) > 1 else 0.0


def speed(results: DecodeResults, which: str, method: str, batch: int) -> float | None:
    """How many times as fast as plain decoding of the same batch."""
    plain, own = results.latency("all", PLAIN, batch), results.latency(which, method, batch)
    return None if plain is None or own is None else plain / own


def tokens_a_round(results: DecodeResults, method: str, batch: int) -> float:
    """New tokens of a row in one of its rounds."""
    calls = results.calls(method, batch)
    return sum(call.tokens for call in calls) / sum(call.scored - call.drafted for call in calls)


def steady(results: DecodeResults, method: str, batch: int) -> float | None:
    """Seconds a token if every round were the middle one: without captures, hiccups, and rounds of the last rows."""
    if not results.calls(method, batch):
        return None
    return percentiles(results, method, batch)[0] / tokens_a_round(results, method, batch)


def percentiles(results: DecodeResults, method: str, batch: int) -> tuple[float, float, float]:
    """Seconds of a round: p50, p90, p99."""
    found = [seconds for call in results.calls(method, batch) for seconds in call.round_seconds]
    cuts = quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return cuts[49], cuts[89], cuts[98]


def _latency(results: DecodeResults) -> Table:
    headings = ("batch", "method", "first", "last", "all", "steady", "tokens a round", "accepted", "mean draft")
    rows = [_latency_row(results, m, b) for b in results.batches for m in results.methods if results.calls(m, b)]
    return Table("Milliseconds a token of a row, and times as fast as plain", headings, tuple(rows))


def _latency_row(results: DecodeResults, method: str, batch: int) -> tuple[str, ...]:
    cells = [_timed(results, which, method, batch) for which in LATENCIES]
    calls = results.calls(method, batch)
    drafted, accepted = sum(call.drafted for call in calls), sum(call.accepted for call in calls)
    passes = sum(call.scored - call.drafted for call in calls)
    rate, mean = (f"{accepted / drafted:.0%}", f"{drafted / passes:.1f}") if drafted else (NOTHING, NOTHING)
    cells.append(_with_speed(steady(results, method, batch), steady(results, PLAIN, batch), method))
    return (str(batch), method, *cells, f"{tokens_a_round(results, method, batch):.2f}", rate, mean)


def _timed(results: DecodeResults, which: str, method: str, batch: int) -> str:
    return _with_speed(results.latency(which, method, batch), results.latency("all", PLAIN, batch), method)


def _with_speed(own: float | None, plain: float | None, method: str) -> str:
    if own is None:
        return NOTHING
    shown = f"{1000 * own:.2f}"
    return shown if method == PLAIN or plain is None else f"{shown} ({plain / own:.2f}x)"


def _rounds(results: DecodeResults) -> Table:
    headings = ("batch", "method", "p50", "p90", "p99", "of bandwidth", "of FLOPS")
    rows = []
    for batch in results.batches:
        for method in results.methods:
            if results.calls(method, batch):
                times = (f"{1000 * value:.2f}" for value in percentiles(results, method, batch))
                shares = (results.read_share(method, batch), results.utilisation(method, batch))
                rows.append((str(batch), method, *times, *(_share(share) for share in shares)))
    return Table("Rounds: milliseconds, and what of the hardware they use", headings, tuple(rows))


def _forward(forward: Forward) -> Table:
    headings = ("rows x positions", "ms", "GB read", "of bandwidth")
    rows = tuple(
        (one.name, f"{1000 * one.median:.3f}", f"{one.num_bytes / 1e9:.2f}", f"{forward.share(one):.0%}")
        for one in forward.passes
    )
    return Table("Forward passes alone, replayed; of a draft with its sampling", headings, rows)


def _device(results: DecodeResults) -> Table:
    headings = ("batch", "method", "wall", "device", "kernels alone", "launches", "wall over device")
    rows = tuple(
        (
            str(each.batch),
            each.method,
            *(f"{1000 * value:.2f}" for value in (each.wall, each.busy, each.kernels)),
            f"{each.launches:.0f}",
            f"{each.over_device:.2f}",
        )
        for each in results.device_times
    )
    return Table("A round's milliseconds, by the clock and on the device", headings, rows)


def _memory(results: DecodeResults) -> Table:
    headings = ("vocabulary", "batch", "draft length", "peak", "held", "cache")
    rows = tuple(
        (
            str(each.vocabulary),
            str(each.batch),
            str(each.length),
            *(f"{max(value, 0) / 2**20:.1f}" for value in (each.peak, each.held, each.cache)),
        )
        for each in results.memory
    )
    return Table("MiB beside weights and cache", headings, rows)


def _peers(results: DecodeResults) -> Table:
    headings = ("transformers", "batch", "ms a token", "tokens", "tokens a target pass")
    rows = tuple(
        (
            peer.title,
            str(peer.batch),
            f"{1000 * peer.seconds_a_token:.1f}",
            str(peer.tokens),
            f"{peer.tokens / max(peer.target_passes, 1):.1f}",
        )
        for peer in results.peers
    )
    return Table("The same pair by transformers, reading the prompt included", headings, rows)


def _where(results: DecodeResults) -> str:
    settings = results.settings
    asked = f"{settings['prompt_length']} tokens of prompt, {settings['new_tokens']} new ones, temperature 1"
    alpha = "" if results.alpha is None else f"; alpha {results.alpha:.3f}"
    return f"{settings['pair']} on {results.provenance.machine.name}: {asked}{alpha}."


def _ceilings(results: DecodeResults) -> list[str]:
    found = results.ceilings
    if found is None:
        return []
    copied = "" if found.copy is None else f"; a copy reads and writes {_rate(found.copy, 'B/s')}"
    reading = _rate(results.bandwidth or found.linear, "B/s")
    return [
        f"Of bandwidth: weights once a pass and live keys, of the {reading} at which a linear layer reads{copied}. "
        f"Of FLOPS: all positions run, of the {_rate(found.operations, 'FLOPS')} of a large product."
    ]


def _rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.2f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"


def _startup(results: DecodeResults) -> list[str]:
    if not results.startups:
        return []
    first = ", ".join(f"{each.seconds:.1f} s at batch {each.batch}" for each in results.startups)
    told = [each.capturing for each in results.startups if each.capturing is not None]
    of_these = f"; of these, capturing: {sum(told):.1f} s" if told else ""
    return [f"First calls of all methods, compiling and capturing included: {first}{of_these}."]


def _captures(results: DecodeResults) -> list[str]:
    rounds = "steady: the middle round over the tokens a round"
    told = [call.captured for call in results.calls_made if call.captured is not None]
    if len(told) < len(results.calls_made):
        return [f"{rounds.capitalize()}. Rounds in which a graph was captured count with what that took."]
    return [f"{rounds.capitalize()}. Capturing took {sum(told):.1f} s of the timed calls and is taken out of them."]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"
