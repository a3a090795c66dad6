"""The engine by itself under a load that `forerun bench serve` sends: no server, no thread, no client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from forerun.bench.serve.load import Level
from forerun.bench.serve.samples import Counts, Sample
from forerun.engine import Engine, Request


def run_bare(
    engine: Engine,
    level: Level,
    request_of: Callable[[int], Request],
    requests: int,
    seconds: float,
    rng: random.Random,
) -> None:
    """Requests by number, at the times at which `run_level` sends them; samples are there as soon as begun."""
    load, running, number, due = level.load, dict[int, Sample](), 0, 0.0
    started = time.perf_counter()
    while True:
        now = time.perf_counter() - started
        is_over = number == requests or now > seconds
        while not is_over and (due <= now if load.concurrency is None else len(running) < load.concurrency):
            sample = Sample(due if load.concurrency is None else time.perf_counter() - started)
            level.samples.append(sample)
            running[engine.add(request_of(number))] = sample
            number += 1
            due += 0.0 if load.rate is None else rng.expovariate(load.rate)
            is_over = number == requests
        if engine.is_idle:
            if is_over:
                return
            time.sleep(max(due - now, 0.0))
            continue
        _step(engine, running, started)
        level.seconds = time.perf_counter() - started


def _step(engine: Engine, running: dict[int, Sample], started: float) -> None:
    progress, now = engine.step(), time.perf_counter() - started
    for gained in progress:
        sample = running[gained.row]
        sample.tokens += len(gained.tokens)
        if sample.ttft is None and gained.tokens:
            sample.ttft = now - sample.arrived
        if gained.finish_reason is not None:
            sample.e2e = now - sample.arrived
    for handle, result in engine.take_results_by_handle().items():
        stats = result.stats
        running.pop(handle).counts = Counts(stats.num_draft_tokens, stats.num_accepted_tokens, stats.rounds)
