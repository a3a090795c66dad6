"""The record of loads and methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.arrivals.results import GOOD_FIRST, GOOD_TOKEN, Measurement, WarmedUp
from forerun.bench.serve.results import percentile
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table
from forerun.measure.turns import TurnsOutcome

KIND = "arrivals"
Columns = Mapping[str, Callable[[Measurement], str]]
Waits = Callable[[Measurement], tuple[float, float]]  # median and 99 %, in seconds
WHAT = "what, requests a second"
WAITS: Columns = {
    "first ms": lambda each: f"{1e3 * each.first_median:.0f}",
    "first, 99 %": lambda each: f"{1e3 * each.first_99:.0f}",
    "token ms": lambda each: f"{1e3 * each.token_median:.2f}",
    "token, 99 %": lambda each: f"{1e3 * each.token_99:.2f}",
    "tokens/s": lambda each: f"{each.throughput:.0f}",
    "needed": lambda each: f"{each.needed:.0f}",
    "goodput/s": lambda each: f"{each.goodput:.1f}",
}
MEMORY: Columns = {
    "rows": lambda each: f"{each.most_rows}",
    "keys": lambda each: f"{each.most_keys}",
    "GB": lambda each: f"{each.key_bytes / 1e9:.2f}",
    "MB in use": lambda each: _megabytes(each, each.peak_bytes),
    "MB live": lambda each: _megabytes(each, each.live_bytes),
    "in rows": lambda each: f"{each.peak_rows}" if each.block else NOTHING,
    "MB beyond": lambda each: _megabytes(each, each.most_beyond),
    "rounds": lambda each: f"{each.rounds}",
    "recorded": lambda each: f"{each.recorded}",
    "compiled": lambda each: f"{each.compiled}",
    "recording s": lambda each: f"{each.captured:.1f}",
}
PROMPTS: Columns = {
    "requests": lambda each: f"{each.requests}",
    "prompt tokens": lambda each: f"{each.prompt_tokens}",
    "read": lambda each: f"{each.read_tokens}",
    "found": lambda each: f"{each.found_tokens}",
    "shared read": lambda each: _number(each.times_shared_was_read, ".2f"),
    "first of first ms": lambda each: _number(each.firsts[0] if each.firsts else None, ".0f", 1e3),
    "of later": lambda each: _number(percentile(each.later_firsts, 50) if each.later_firsts else None, ".0f", 1e3),
    "99 %": lambda each: _number(percentile(each.later_firsts, 99) if each.later_firsts else None, ".0f", 1e3),
}


def make_record(
    origin: Provenance,
    settings: Mapping[str, Any],
    measured: Sequence[Measurement],
    outcome: TurnsOutcome,
    warmed: Mapping[str, WarmedUp] | None = None,
    built: float = 0.0,  # seconds in which the models were
) -> Record:
    """Of loads, or of warm-ups alone."""
    warm_ups = {method: asdict(each) for method, each in (warmed or {}).items()}
    is_alone = bool(settings.get("warm_up_only"))
    remarks = _warm_up_remarks(origin, settings, outcome) if is_alone else _remarks(origin, settings, measured, outcome)
    return Record(
        KIND,
        origin,
        settings=settings,
        rows=[{"method": method, **each} for method, each in warm_ups.items()]
        if is_alone
        else [asdict(each) for each in measured],
        details={"warm_up": warm_ups, "built_seconds": built},
        tables=(*(_tables(measured) if measured else ()), *((_warm_up_table(warmed),) if warmed else ())),
        remarks=(*remarks, *_warm_ups(warmed or {}), f"The models were built in {built:.1f} s."),
        figure=figure(measured, origin),
        complete=outcome.complete,
    )


def _number(value: float | None, form: str, times: float = 1.0) -> str:
    return NOTHING if value is None else f"{times * value:{form}}"


def _megabytes(each: Measurement, value: float) -> str:
    """Nothing where keys do not lie in blocks."""
    return f"{value / 1e6:.1f}" if each.block else NOTHING


def _name(each: Measurement) -> str:
    return ", ".join([each.method, f"{each.rate:g}", *_oddities(each)])


def _kind(each: Measurement) -> str:
    """What was sent by which method, whatever the rate."""
    return ", ".join([each.method, *_oddities(each)])


def _oddities(each: Measurement) -> list[str]:
    penalised = [f"{each.penalised:.0%} with a penalty"] if each.penalised else []
    return [*penalised, f"{each.shared} shared tokens"] if each.shared else penalised


def _tables(measured: Sequence[Measurement]) -> tuple[Table, ...]:
    return (
        _table("Waiting for tokens", WAITS, measured),
        _table("Prompts, and first tokens of the first request and of those after it", PROMPTS, measured),
        _table("Memory for keys and values, and rounds", MEMORY, measured),
    )


def _table(title: str, columns: Columns, measured: Sequence[Measurement]) -> Table:
    rows = tuple((_name(each), *(cell(each) for cell in columns.values())) for each in measured)
    return Table(title, (WHAT, *columns), rows)


def _remarks(
    origin: Provenance, settings: Mapping[str, Any], measured: Sequence[Measurement], outcome: TurnsOutcome
) -> tuple[str, ...]:
    lines = [
        f"{origin.machine.name}; {settings['model']}, Poisson arrivals for {settings['seconds']:g} s, prompts of "
        f"{settings['prompt'][0]} to {settings['prompt'][1]} tokens ({settings['prompts']}), temperature "
        f"{settings['temperature']:g}, outputs of {settings['output'][0]} to "
        f"{settings['output'][1]}, at most {settings['max_rows']} at once",
        "first: from arrival to the first token; token: after it, the mean of a request; needed: tokens that arrive a "
        f"second; goodput: requests whose first token came within {1e3 * GOOD_FIRST:.0f} ms and the others every "
        f"{1e3 * GOOD_TOKEN:.0f} ms; keys: held at once at most, all rows together; GB: reserved for them; "
        "recorded, compiled: pieces of rounds and variants of kernels after the warm-up",
        "read, found: tokens of prompts that passes took in, and whose keys others had made; shared read: how often "
        "what all prompts begin with was; MB in use: blocks that rows hold, when most were; MB live: tokens in them "
        "then, shared ones for each row; MB beyond: in use above live tokens, a twentieth more and a block a row, at "
        "the worst moment (0: never above)",
        *(
            f"{_name(each)}: {each.shortfall} requests got another number of tokens"
            for each in measured
            if each.shortfall
        ),
        *outcome.problems,
    ]
    if not outcome.complete:
        lines.append("Not complete: these are the loads until then.")
    return tuple(lines)


def _warm_up_remarks(origin: Provenance, settings: Mapping[str, Any], outcome: TurnsOutcome) -> tuple[str, ...]:
    lines = [f"{origin.machine.name}; {settings['model']}, warm-ups alone", *outcome.problems]
    return (*lines, *(() if outcome.complete else ("Not complete: these are the warm-ups until then.",)))


def _warm_up_table(warmed: Mapping[str, WarmedUp]) -> Table:
    rows = (
        (method, f"{each.rows}", f"{each.draft}", f"{each.context}", f"{each.seconds:.1f}", f"{each.num_rounds}",
         f"{each.recorded}", f"{each.num_compiled}")
        for method, each in warmed.items()
    )  # fmt: skip
    headings = ("what", "rows", "drafts to", "context", "seconds", "rounds recorded", "pieces recorded", "compiled")
    return Table("Warm-up", headings, tuple(rows))


def _warm_ups(warmed: Mapping[str, WarmedUp]) -> list[str]:
    return [f"{method}: nothing recorded: {each.remark}" for method, each in warmed.items() if each.remark]


def figure(measured: Sequence[Measurement], origin: Provenance) -> Figure | None:
    """Waits over the rate, a line a method, or bars where there is one rate alone.

    Odd requests are shown where no others were sent.
    """
    measured = [each for each in measured if not each.penalised and not each.shared] or measured
    if not measured:
        return None
    panels = []
    for title, value in (
        ("first token", lambda each: (each.first_median, each.first_99)),
        ("each following token", lambda each: (each.token_median, each.token_99)),
    ):
        draw = _bars if len({each.rate for each in measured}) == 1 else _lines
        panels.append(draw(title, measured, value))
    return Figure(f"Requests that come and go, {origin.machine.name}", tuple(panels), columns=2)


def _lines(title: str, measured: Sequence[Measurement], value: Waits) -> Panel:
    series = []
    for kind in dict.fromkeys(map(_kind, measured)):
        ours = [each for each in measured if _kind(each) == kind]
        rates = tuple(each.rate for each in ours)
        for place, (what, dashes) in enumerate((("median", "-"), ("99 %", ":"))):
            times = tuple(1e3 * value(each)[place] for each in ours)
            series.append(Series(f"{kind}, {what}", rates, times, dashes=dashes))
    ticks = tuple(sorted({each.rate for each in measured}))
    return Panel(title, "requests a second", "ms", tuple(series), x_ticks=ticks, x_scale="log", y_scale="log10")


def _bars(title: str, measured: Sequence[Measurement], value: Waits) -> Panel:
    places = tuple(map(float, range(len(measured))))
    series = tuple(
        Series(what, places, tuple(1e3 * value(each)[place] for each in measured), kind="bars", values="%.1f")
        for place, what in enumerate(("median", "99 %"))
    )
    kinds = tuple(map(_kind, measured))
    return Panel(title, f"{measured[0].rate:g} requests a second", "ms", series, x_ticks=places, x_names=kinds)
