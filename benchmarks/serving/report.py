"""The record of loads: what clients saw, what the engine does alone, and what was asked of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.bench.serve.load import LoadLevel
from forerun.bench.serve.results import answered, percentile, tokens_per_second, told_counts, values
from forerun.engine.device.warm_up import WarmUp
from forerun.measure.plot import BLUE, GREY, RED, Figure, Panel, Series
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import Table
from forerun.measure.turns import TurnsOutcome

KIND = "serving"
HTTP, BARE = "HTTP", "engine"
MOST_TPOT, MOST_FIRST = 1.05, 0.005  # of HTTP over the engine alone: a factor, and seconds
LEAST_SPEED = 0.95  # of tokens a second with drafts over those without
LEAST_GAIN = {1: 2.5, 8: 2.0}  # streams: time per token without drafts over the one with them
MOST_AT_RATES = 1.10  # of HTTP over the engine alone under arrivals
HEADINGS = (
    "load",
    "by",
    "requests",
    "failed",
    "first ms",
    "first, 99 %",
    "token ms",
    "token, 99 %",
    "tokens/s",
    "a round",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load, over HTTP or by the engine alone. Seconds."""

    by: str
    load: str
    streams: int | None
    drafts: str | None
    requests: int
    failed: int
    seconds: float
    tokens_per_second: float
    first_median: float
    first_99: float
    token_median: float
    token_99: float
    tokens_per_round: float | None

    @property
    def name(self) -> str:
        return self.load if self.drafts == "on" else f"{self.load}, no drafts"


def summarize(by: str, level: LoadLevel) -> Measurement:
    first, later, counts = values(level, "ttft"), values(level, "tpot"), told_counts(level)
    rounds = None if counts is None else counts.rounds
    good = answered(level)
    return Measurement(
        by=by,
        load=level.load.name,
        streams=level.load.concurrency,
        drafts=level.speculation,
        requests=len(good),
        failed=len(level.samples) - len(good),
        seconds=level.seconds,
        tokens_per_second=tokens_per_second(level),
        first_median=percentile(first, 50),
        first_99=percentile(first, 99),
        token_median=percentile(later, 50),
        token_99=percentile(later, 99),
        tokens_per_round=sum(sample.tokens for sample in good) / rounds if rounds else None,
    )


def make_record(
    origin: Provenance,
    settings: Mapping[str, Any],
    measured: Sequence[Measurement],
    outcome: TurnsOutcome,
    warmed: WarmUp,
) -> Record:
    (shortest, longest), (least, most) = settings["rate_prompt"], settings["rate_output"]
    remarks = [
        f"{origin.machine.name}; {settings['model']}, temperature 1; streams: {settings['prompt']} + "
        f"{settings['output']} tokens, begun one by one within {settings['ramp']:g} s, a new request when one ends; "
        f"arrivals at random: {shortest} to {longest} + {least} to {most} tokens",
        "HTTP: as `forerun bench serve` sees it from a process of its own; engine: the same requests without server, "
        "arrivals at the same times; token ms: time per token after the first, of the median request",
        f"warm-up of {warmed.seconds:.1f} s, {warmed.num_rounds} rounds recorded, {warmed.num_compiled} kernels "
        f"compiled{': ' if warmed.remark else ''}{warmed.remark}",
        *outcome.problems,
    ]
    if not outcome.complete:
        remarks.append("Not complete: these are the loads until then.")
    return Record(
        KIND,
        origin,
        settings=settings,
        rows=[asdict(each) for each in measured],
        details={"warm_up": asdict(warmed)},
        tables=(Table("The server and its engine", HEADINGS, tuple(map(_cells, measured))),) if measured else (),
        remarks=tuple(remarks),
        headline=tuple(goals(measured)),
        figure=_figure(measured, origin),
        complete=outcome.complete,
    )


def _figure(measured: Sequence[Measurement], origin: Provenance) -> Figure | None:
    """Waits over the number of streams: through the server with drafts and without, and of the engine alone."""
    lines = {
        "HTTP": (HTTP, "on", RED, "-"),
        "HTTP, no drafts": (HTTP, "off", GREY, "-"),
        "engine alone": (BARE, "on", BLUE, "--"),
    }
    panels = []
    for title, name in (("first token, median", "first_median"), ("each following token, median", "token_median")):
        series = []
        for label, (by, drafts, colour, dashes) in lines.items():
            points = sorted(
                (each.streams, 1e3 * getattr(each, name))
                for each in measured
                if each.streams is not None and (each.by, each.drafts) == (by, drafts)
            )
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(label, tuple(map(float, x)), y, colour=colour, dashes=dashes))
        if not series:
            return None
        ticks = tuple(sorted({place for each in series for place in each.x}))
        panels.append(Panel(title, "streams", "ms", tuple(series), x_ticks=ticks, x_scale="log"))
    return Figure(f"The server and its engine, {origin.machine.name}", tuple(panels), columns=2, panel_size=(5.0, 3.8))


def goals(measured: Sequence[Measurement]) -> Iterator[str]:
    """What was asked, and what came out."""
    by_place = {(each.by, each.load, each.drafts): each for each in measured}
    for (by, load, drafts), each in by_place.items():
        if by != HTTP or drafts != "on":
            continue
        if alone := by_place.get((BARE, load, drafts)):
            factor, more = each.token_median / alone.token_median, each.first_median - alone.first_median
            most = MOST_AT_RATES if each.streams is None else MOST_TPOT
            yield f"{load}: time per token {factor:.3f} of the engine's ({_verdict(factor <= most)}: {most:.2f})"
            yield f"{load}: first token {1e3 * more:+.1f} ms ({_verdict(more <= MOST_FIRST)}: +5)"
        if plain := by_place.get((HTTP, load, "off")):
            speed = each.tokens_per_second / plain.tokens_per_second
            yield f"{load}: {speed:.2f} of the tokens a second without drafts ({_verdict(speed >= LEAST_SPEED)}: 0.95)"
            if least := LEAST_GAIN.get(each.streams or 0):
                gain = plain.token_median / each.token_median
                yield f"{load}: drafts make a token {gain:.2f} times as fast ({_verdict(gain >= least)}: {least})"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _cells(each: Measurement) -> tuple[str, ...]:
    times = (each.first_median, each.first_99, each.token_median, each.token_99)
    return (
        each.name, each.by, str(each.requests), str(each.failed),
        *("-" if math.isnan(time) else f"{1e3 * time:.2f}" for time in times),
        f"{each.tokens_per_second:.0f}", "-" if each.tokens_per_round is None else f"{each.tokens_per_round:.2f}",
    )  # fmt: skip
