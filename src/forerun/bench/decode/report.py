"""Results as a record: latencies, rounds, passes, memory and peers as tables, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from statistics import stdev
from typing import Any

from forerun.bench.decode.calls import TimedCall
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
DETAILS = ("target", "draft", "ceilings", "alpha", "forward", "startups", "device_times", "memory", "peers")


def make_record(results: DecodeResults, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(call) for call in results.calls_made],
        details={name: getattr(results, name) for name in DETAILS},
        tables=tables(results),
        remarks=remarks(results, complete),
        figure=figure(results) if results.calls_made else None,
        complete=complete,
    )


def tables(results: DecodeResults) -> tuple[Table, ...]:
    """Those that have rows: on a CPU there are no forward passes, device times and memory."""
    parts = (_latency, _rounds, _forward, _device, _memory, _peers)
    return tuple(table for part in parts if (table := part(results)).rows)


def remarks(results: DecodeResults, complete: bool) -> tuple[str, ...]:
    settings = results.settings
    alpha = "" if results.alpha is None else f"; alpha {results.alpha:.3f}"
    captured = sum(call.captured for call in results.calls_made)
    lines = [
        f"{settings['pair']} on {results.provenance.machine.name}: {settings['prompt_length']} tokens of prompt, "
        f"{settings['new_tokens']} new ones, temperature 1{alpha}.",
        *_ceilings(results),
        *_startup(results),
        f"Steady: the middle round over the tokens a round. Capturing took {captured:.1f} s of the timed calls and is "
        "taken out of them.",
        *(f"Note: {note}." for note in results.notes),
    ]
    return tuple(lines if complete else [*lines, "Incomplete: these are the parts that were measured."])


def figure(results: DecodeResults) -> Figure:
    """Latency by batch, BASS's picture of latency and utilisation, share of bandwidth, memory by draft length."""
    batches = tuple(map(float, results.batches))
    latency, use, bandwidth = [], [], []
    for method in results.methods:
        timed = [batch for batch in results.batches if results.calls(method, batch)]
        x, style = tuple(map(float, timed)), STYLES.get(method, {})
        times = tuple(1000 * (results.steady(method, batch) or 0.0) for batch in timed)
        error = tuple(1000 * _spread(results.calls(method, batch)) for batch in timed)
        latency.append(Series(method, x, times, error=error, **style))
        if results.ceilings is not None:
            used = tuple(100 * (results.utilisation(method, batch) or 0.0) for batch in timed)
            read = tuple(100 * (results.read_share(method, batch) or 0.0) for batch in timed)
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
    for place, vocabulary in enumerate(dict.fromkeys(case.vocabulary for case in results.memory)):
        cases = sorted((case for case in results.memory if case.vocabulary == vocabulary), key=lambda case: case.length)
        label = f"vocabulary {vocabulary}, batch {cases[0].batch}"
        x, y = tuple(float(case.length) for case in cases), tuple(case.beside / 2**20 for case in cases)
        series.append(Series(label, x, y, colour=COLOURS[place]))
    lengths = tuple(float(length) for length in sorted({case.length for case in results.memory}))
    return Panel("memory", "draft length", "MiB beside weights and cache", tuple(series), lengths)


def _spread(calls: list[TimedCall]) -> float:
    """Of seconds a token, call by call."""
    seconds = [call.seconds / call.tokens * call.batch for call in calls]
    return stdev(seconds) if len(seconds) > 1 else 0.0


def _latency(results: DecodeResults) -> Table:
    headings = ("batch", "method", "first", "last", "all", "steady", "tokens a round", "accepted", "mean draft")
    rows = []
    for batch, method in results.timed:
        calls, plain = results.calls(method, batch), results.latency("all", PLAIN, batch)
        drafted, accepted = sum(call.drafted for call in calls), sum(call.accepted for call in calls)
        passes = sum(call.row_passes for call in calls)
        rows.append(
            (
                str(batch),
                method,
                *(_with_speed(results.latency(rows_of, method, batch), plain, method) for rows_of in headings[2:5]),
                _with_speed(results.steady(method, batch), results.steady(PLAIN, batch), method),
                f"{results.tokens_a_round(method, batch):.2f}",
                f"{accepted / drafted:.0%}" if drafted else NOTHING,
                f"{drafted / passes:.1f}" if drafted else NOTHING,
            )
        )
    return Table("Milliseconds a token of a row, and times as fast as plain", headings, tuple(rows))


def _with_speed(seconds: float | None, plain: float | None, method: str) -> str:
    if seconds is None:
        return NOTHING
    shown = f"{1000 * seconds:.2f}"
    return shown if method == PLAIN or plain is None else f"{shown} ({plain / seconds:.2f}x)"


def _rounds(results: DecodeResults) -> Table:
    headings = ("batch", "method", "p50", "p90", "p99", "of bandwidth", "of FLOPS")
    rows = []
    for batch, method in results.timed:
        times = (f"{1000 * value:.2f}" for value in results.percentiles(method, batch))
        shares = (results.read_share(method, batch), results.utilisation(method, batch))
        rows.append((str(batch), method, *times, *(NOTHING if share is None else f"{share:.1%}" for share in shares)))
    return Table("Rounds: milliseconds, and what of the hardware they use", headings, tuple(rows))


def _forward(results: DecodeResults) -> Table:
    headings, forward = ("rows x positions", "ms", "GB read", "of bandwidth"), results.forward
    rows = () if forward is None else tuple(
        (one.name, f"{1000 * one.median:.3f}", f"{one.num_bytes / 1e9:.2f}", f"{forward.share(one):.0%}")
        for one in forward.passes
    )  # fmt: skip
    return Table("Forward passes alone, replayed; of a draft with its sampling", headings, rows)


def _device(results: DecodeResults) -> Table:
    headings = ("batch", "method", "wall", "device", "kernels alone", "launches", "wall over device")
    rows = tuple(
        (
            str(round_.batch),
            round_.method,
            *(f"{1000 * value:.2f}" for value in (round_.wall, round_.busy, round_.kernels)),
            f"{round_.launches:.0f}",
            f"{round_.over_device:.2f}",
        )
        for round_ in results.device_times
    )
    return Table("A round's milliseconds, by the clock and on the device", headings, rows)


def _memory(results: DecodeResults) -> Table:
    headings = ("vocabulary", "batch", "draft length", "peak", "held", "cache")
    rows = tuple(
        (
            *map(str, (case.vocabulary, case.batch, case.length)),
            *(f"{max(value, 0) / 2**20:.1f}" for value in (case.peak, case.held, case.cache)),
        )
        for case in results.memory
    )
    return Table("MiB beside weights and cache", headings, rows)


def _peers(results: DecodeResults) -> Table:
    headings = ("transformers", "batch", "ms a token", "tokens", "tokens a target pass")
    rows = tuple(
        (
            peer.title,
            str(peer.batch),
            f"{1000 * peer.seconds / peer.tokens:.1f}",  # of a row: not divided by the batch
            str(peer.tokens),
            f"{peer.tokens / max(peer.target_passes, 1):.1f}",
        )
        for peer in results.peers
    )
    return Table("The same pair by transformers, reading the prompt included", headings, rows)


def _ceilings(results: DecodeResults) -> list[str]:
    ceilings = results.ceilings
    if ceilings is None:
        return []
    copied = "" if ceilings.copy is None else f"; a copy reads and writes {_rate(ceilings.copy, 'B/s')}"
    reading = _rate(results.bandwidth or ceilings.linear, "B/s")
    return [
        f"Of bandwidth: weights once a pass and live keys, of the {reading} at which a linear layer reads{copied}. "
        f"Of FLOPS: all positions run, of the {_rate(ceilings.operations, 'FLOPS')} of a large product."
    ]


def _rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.2f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"


def _startup(results: DecodeResults) -> list[str]:
    if not results.startups:
        return []
    first = ", ".join(f"{startup.seconds:.1f} s at batch {startup.batch}" for startup in results.startups)
    capturing = sum(startup.capturing for startup in results.startups)
    return [
        f"First calls of all methods, compiling and capturing included: {first}; "
        f"of these, capturing: {capturing:.1f} s."
    ]
