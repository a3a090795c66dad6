"""The record of a run as tables of text."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

from forerun.bench.decode.goals import goals
from forerun.bench.decode.methods import PLAIN
from forerun.bench.decode.record import DecodeRecord
from forerun.bench.forward import Forward
from forerun.measure.table import NOTHING, Table

LATENCIES = ("first", "last", "all")


def tables(record: DecodeRecord) -> list[Table]:
    made = [_latency(record), _rounds(record)]
    made += [_forward(record.forward)] if record.forward is not None else []
    made += [_device(record)] if record.device_times else []
    made += [_memory(record)] if record.memory else []
    made += [_peers(record)] if record.peers else []
    return [table for table in made if table.rows]


def remarks(record: DecodeRecord) -> list[str]:
    lines = [_where(record), *_ceilings(record), *_startup(record), *_captures(record), *goals(record)]
    lines += [f"Note: {note}." for note in record.notes]
    return lines if record.complete else [*lines, "Incomplete: these are the parts that were measured."]


def summary(record: DecodeRecord) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    return {
        "goals": goals(record),
        "cells": [
            {
                "method": method,
                "batch": batch,
                **{f"{which}_ms": _ms_of(record, which, method, batch) for which in LATENCIES},
                "times_plain": speed(record, "all", method, batch),
                "steady_ms": 1000 * (steady(record, method, batch) or 0.0),
                "tokens_a_round": tokens_a_round(record, method, batch),
                "read_share": record.read_share(method, batch),
                "utilisation": record.utilisation(method, batch),
                "round_ms_p50_p90_p99": [1000 * value for value in percentiles(record, method, batch)],
            }
            for batch in record.batches
            for method in record.methods
            if record.calls(method, batch)
        ],
    }


def speed(record: DecodeRecord, which: str, method: str, batch: int) -> float | None:
    """How many times as fast as plain decoding of the same batch."""
    plain, own = record.latency("all", PLAIN, batch), record.latency(which, method, batch)
    return None if plain is None or own is None else plain / own


def tokens_a_round(record: DecodeRecord, method: str, batch: int) -> float:
    """New tokens of a row in one of its rounds."""
    calls = record.calls(method, batch)
    return sum(call.tokens for call in calls) / sum(call.scored - call.drafted for call in calls)


def steady(record: DecodeRecord, method: str, batch: int) -> float | None:
    """Seconds a token if every round were the middle one: without captures, hiccups, and rounds of the last rows."""
    if not record.calls(method, batch):
        return None
    return percentiles(record, method, batch)[0] / tokens_a_round(record, method, batch)


def percentiles(record: DecodeRecord, method: str, batch: int) -> tuple[float, float, float]:
    """Seconds of a round: p50, p90, p99."""
    found = [seconds for call in record.calls(method, batch) for seconds in call.round_seconds]
    cuts = quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return cuts[49], cuts[89], cuts[98]


def _latency(record: DecodeRecord) -> Table:
    headings = ("batch", "method", "first", "last", "all", "steady", "tokens a round", "accepted", "mean draft")
    rows = [_latency_row(record, m, b) for b in record.batches for m in record.methods if record.calls(m, b)]
    return Table("Milliseconds a token of a row, and times as fast as plain", headings, tuple(rows))


def _latency_row(record: DecodeRecord, method: str, batch: int) -> tuple[str, ...]:
    cells = [_timed(record, which, method, batch) for which in LATENCIES]
    calls = record.calls(method, batch)
    drafted, accepted = sum(call.drafted for call in calls), sum(call.accepted for call in calls)
    passes = sum(call.scored - call.drafted for call in calls)
    rate, mean = (f"{accepted / drafted:.0%}", f"{drafted / passes:.1f}") if drafted else (NOTHING, NOTHING)
    cells.append(_with_speed(steady(record, method, batch), steady(record, PLAIN, batch), method))
    return (str(batch), method, *cells, f"{tokens_a_round(record, method, batch):.2f}", rate, mean)


def _timed(record: DecodeRecord, which: str, method: str, batch: int) -> str:
    return _with_speed(record.latency(which, method, batch), record.latency("all", PLAIN, batch), method)


def _with_speed(own: float | None, plain: float | None, method: str) -> str:
    if own is None:
        return NOTHING
    shown = f"{1000 * own:.2f}"
    return shown if method == PLAIN or plain is None else f"{shown} ({plain / own:.2f}x)"


def _ms_of(record: DecodeRecord, which: str, method: str, batch: int) -> float | None:
    value = record.latency(which, method, batch)
    return None if value is None else 1000 * value


def _rounds(record: DecodeRecord) -> Table:
    headings = ("batch", "method", "p50", "p90", "p99", "of bandwidth", "of FLOPS")
    rows = []
    for batch in record.batches:
        for method in record.methods:
            if record.calls(method, batch):
                times = (f"{1000 * value:.2f}" for value in percentiles(record, method, batch))
                shares = (record.read_share(method, batch), record.utilisation(method, batch))
                rows.append((str(batch), method, *times, *(_share(share) for share in shares)))
    return Table("Rounds: milliseconds, and what of the hardware they use", headings, tuple(rows))


def _forward(forward: Forward) -> Table:
    headings = ("rows x positions", "ms", "GB read", "of bandwidth")
    rows = tuple(
        (one.name, f"{1000 * one.median:.3f}", f"{one.num_bytes / 1e9:.2f}", f"{forward.share(one):.0%}")
        for one in forward.passes
    )
    return Table("Forward passes alone, replayed; of a draft with its sampling", headings, rows)


def _device(record: DecodeRecord) -> Table:
    headings = ("batch", "method", "wall", "device", "kernels alone", "launches", "wall over device")
    rows = tuple(
        (
            str(each.batch),
            each.method,
            *(f"{1000 * value:.2f}" for value in (each.wall, each.busy, each.kernels)),
            f"{each.launches:.0f}",
            f"{each.over_device:.2f}",
        )
        for each in record.device_times
    )
    return Table("A round's milliseconds, by the clock and on the device", headings, rows)


def _memory(record: DecodeRecord) -> Table:
    headings = ("vocabulary", "batch", "draft length", "peak", "held", "cache")
    rows = tuple(
        (
            str(each.vocabulary),
            str(each.batch),
            str(each.length),
            *(f"{max(value, 0) / 2**20:.1f}" for value in (each.peak, each.held, each.cache)),
        )
        for each in record.memory
    )
    return Table("MiB beside weights and cache", headings, rows)


def _peers(record: DecodeRecord) -> Table:
    headings = ("transformers", "batch", "ms a token", "tokens", "tokens a target pass")
    rows = tuple(
        (
            peer.title,
            str(peer.batch),
            f"{1000 * peer.seconds_a_token:.1f}",
            str(peer.tokens),
            f"{peer.tokens / max(peer.target_passes, 1):.1f}",
        )
        for peer in record.peers
    )
    return Table("The same pair by transformers, reading the prompt included", headings, rows)


def _where(record: DecodeRecord) -> str:
    machine, settings = record.provenance.machine, record.settings
    asked = f"{settings['prompt_length']} tokens of prompt, {settings['new_tokens']} new ones, temperature 1"
    alpha = "" if record.alpha is None else f"; alpha {record.alpha:.3f}"
    return f"{settings['pair']} on {machine.gpu or machine.cpu}: {asked}{alpha}."


def _ceilings(record: DecodeRecord) -> list[str]:
    found = record.ceilings
    if found is None:
        return []
    copied = "" if found.copy is None else f"; a copy reads and writes {_rate(found.copy, 'B/s')}"
    reading = _rate(record.bandwidth or found.linear, "B/s")
    return [
        f"Of bandwidth: weights once a pass and live keys, of the {reading} at which a linear layer reads{copied}. "
        f"Of FLOPS: all positions run, of the {_rate(found.operations, 'FLOPS')} of a large product."
    ]


def _rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.2f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"


def _startup(record: DecodeRecord) -> list[str]:
    if not record.startups:
        return []
    first = ", ".join(f"{each.seconds:.1f} s at batch {each.batch}" for each in record.startups)
    told = [each.capturing for each in record.startups if each.capturing is not None]
    of_these = f"; of these, capturing: {sum(told):.1f} s" if told else ""
    return [f"First calls of all methods, compiling and capturing included: {first}{of_these}."]


def _captures(record: DecodeRecord) -> list[str]:
    rounds = "steady: the middle round over the tokens a round"
    told = [call.captured for call in record.measurements if call.captured is not None]
    if len(told) < len(record.measurements):
        return [f"{rounds.capitalize()}. Rounds in which a graph was captured count with what that took."]
    return [f"{rounds.capitalize()}. Capturing took {sum(told):.1f} s of the timed calls and is taken out of them."]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"
