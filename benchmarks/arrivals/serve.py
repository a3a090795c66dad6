"""One engine under one load, in real time: requests are added when they are due, and every token is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.arrivals.traffic import Arrival
from forerun.cache.paged import PagedCache
from forerun.engine import Engine
from forerun.engine.row import Progress
from forerun.kernels.compiling import watched_variants


@dataclass(slots=True)
class Served:
    """One request: when it came, and when it gained how many tokens. Seconds after the beginning."""

    came: float
    asked: int  # tokens it was to have
    gains: list[tuple[float, int]] = field(default_factory=list)
    prompt: int = 0  # tokens

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


@dataclass(frozen=True, slots=True)
class Memory:
    """What the target's cache holds after a step, in keys."""

    used: int  # in blocks that rows hold, whatever lies in them
    live: int  # that rows have; those that several rows share count for each of them
    rows: int
    block: int

    @property
    def allowed(self) -> float:
        """Live tokens, a twentieth more, and a block a row."""
        return 1.05 * self.live + self.block * self.rows


NO_MEMORY = Memory(0, 0, 0, 0)


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
    peak: Memory = NO_MEMORY  # when most blocks were in use; none where rows do not lie in blocks
    most_beyond: float = 0.0  # keys in blocks beyond what is allowed, at the worst moment
    bytes_per_key: float = 0.0
    found: int = 0  # tokens of prompts whose keys other rows had made


def serve(engine: Engine, traffic: Sequence[Arrival], max_rows: int) -> Outcome:
    """All of it to its end; no more than `max_rows` decode at once, the others wait outside."""
    outcome = Outcome(
        [Served(arrival.at, arrival.request.max_new_tokens, prompt=len(arrival.request.prompt)) for arrival in traffic]
    )
    captured, recorded, found_before = engine.seconds.capture, engine.num_recordings, _found(engine)
    try:
        with watched_variants() as variants:
            _serve(engine, traffic, max_rows, outcome)
    finally:
        engine.arrivals = None
    outcome.captured, outcome.recorded = engine.seconds.capture - captured, engine.num_recordings - recorded
    outcome.found = _found(engine) - found_before
    outcome.compiled = variants.num_compiled + variants.num_found
    return outcome


def _found(engine: Engine) -> int:
    """Among keys that were there, or made by a neighbour in the same pass."""
    return engine.num_prefix_hits + engine.target.num_shared


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
        if isinstance(cache, PagedCache):
            _look_at_blocks(cache, outcome)
        engine.take_results()
    outcome.seconds = time.perf_counter() - started


def _look_at_blocks(cache: PagedCache, outcome: Outcome) -> None:
    now = Memory(
        cache.num_used * cache.block_size, sum(map(cache.length, cache.rows)), len(cache.rows), cache.block_size
    )
    if now.used > outcome.peak.used:
        outcome.peak, outcome.bytes_per_key = now, cache.bytes_per_key()
    outcome.most_beyond = max(outcome.most_beyond, now.used - now.allowed)


def _note(progress: Sequence[Progress], now: float, running: dict[int, int], outcome: Outcome) -> None:
    for gained in progress:
        if gained.tokens:
            outcome.served[running[gained.row]].gains.append((now, len(gained.tokens)))
        if gained.finish_reason is not None:
            del running[gained.row]
