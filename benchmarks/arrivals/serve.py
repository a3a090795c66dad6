"""One engine under one load, in real time: requests are added when they are due, and every token is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.arrivals.traffic import Arrival
from forerun.engine import Engine
from forerun.engine.row import Progress
from forerun.kernels.variants import watched_variants


@dataclass(slots=True)
class Served:
    """One request: when it came, and when it gained how many tokens. Seconds after the beginning."""

    came: float
    asked: int  # tokens it was to have
    gains: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.gains)

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.gains[0][0] - self.came

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first gain; None where there was no other."""
        later = self.tokens - self.gains[0][1]
        return (self.gains[-1][0] - self.gains[0][0]) / later if later else None


@dataclass(slots=True)
class Outcome:
    """All requests of one load, in the order in which they came."""

    served: list[Served]
    seconds: float = 0.0  # until the last token
    captured: float = 0.0  # of which went into recording rounds
    recorded: int = 0  # pieces of work; after a warm-up this and the next are 0
    compiled: int = 0  # variants of kernels, those included that were found on disk
    rounds: int = 0
    most_rows: int = 0
    key_bytes: int = 0  # of keys and values in the target's cache, reserved
    most_keys: int = 0  # that rows held at once


def serve(engine: Engine, traffic: Sequence[Arrival], max_rows: int) -> Outcome:
    """All of it to its end; no more than `max_rows` decode at once, the others wait outside."""
    outcome = Outcome([Served(arrival.at, arrival.request.max_new_tokens) for arrival in traffic])
    captured, recorded = engine.seconds.capture, engine.num_recordings
    try:
        with watched_variants() as variants:
            _serve(engine, traffic, max_rows, outcome)
    finally:
        engine.arrivals = None
    outcome.captured, outcome.recorded = engine.seconds.capture - captured, engine.num_recordings - recorded
    outcome.compiled = variants.num_compiled + variants.num_found
    return outcome


def _serve(engine: Engine, traffic: Sequence[Arrival], max_rows: int, outcome: Outcome) -> None:
    waiting, running = list(range(len(traffic))), dict[int, int]()
    cache, started = engine.target.cache, time.perf_counter()

    def add_due() -> None:
        now = time.perf_counter() - started
        while waiting and traffic[waiting[0]].at <= now and len(running) < max_rows:
            number = waiting.pop(0)
            running[engine.add(traffic[number].request)] = number

    engine.arrivals = add_due
    while waiting or not engine.is_idle:
        add_due()
        if engine.is_idle:
            time.sleep(max(traffic[waiting[0]].at - (time.perf_counter() - started), 0.0))
            continue
        outcome.most_rows = max(outcome.most_rows, len(running))
        _note(engine.step(), time.perf_counter() - started, running, outcome)
        outcome.rounds += 1
        outcome.key_bytes = max(outcome.key_bytes, cache.num_bytes())
        outcome.most_keys = max(outcome.most_keys, sum(map(cache.length, cache.rows)))
        engine.take_results()
    outcome.seconds = time.perf_counter() - started


def _note(progress: Sequence[Progress], now: float, running: dict[int, int], outcome: Outcome) -> None:
    for gained in progress:
        if gained.tokens:
            outcome.served[running[gained.row]].gains.append((now, len(gained.tokens)))
        if gained.finish_reason is not None:
            del running[gained.row]
