"""The engine by itself under a load that `forerun bench serve` sends: no server, no thread, no client."""

from __future__ import annotations

import random
import time
from bisect import bisect
from collections.abc import Callable

from forerun.bench.serve.load import Level
from forerun.bench.serve.samples import Counts, Sample
from forerun.engine import Engine, Request


class BareLoad:
    """Requests by number, at the times at which `run_level` sends them; samples are there as soon as begun."""

    def __init__(
        self,
        engine: Engine,
        level: Level,
        request_of: Callable[[int], Request],
        requests: int,
        seconds: float,
        rng: random.Random,
    ) -> None:
        self.engine, self.level, self._request_of = engine, level, request_of
        self._requests, self._seconds, self._rng = requests, seconds, rng
        self._running: dict[int, Sample] = {}  # by handle
        self._number = 0  # of the next request
        self._starts = level.load.starts
        self._due = 0.0  # when the next comes, where arrivals are at random
        self._started = 0.0

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._started

    @property
    def _is_over(self) -> bool:
        return self._number == self._requests or self._now > self._seconds

    def run(self) -> None:
        self._started = time.perf_counter()
        self.engine.arrivals = self._add_due  # whoever comes during a round is heard of as an AsyncEngine hears of it
        try:
            while not (self._is_over and self.engine.is_idle):
                self._add_due()
                if not self.engine.is_idle:
                    self._step()
                    self.level.seconds = self._now
                elif not self._is_over:
                    time.sleep(max(self._due - self._now, 0.0))  # of a fixed number, one is always due here
        finally:
            self.engine.arrivals = None

    def _add_due(self) -> None:
        """All that would have been sent by now."""
        while not self._is_over and self._is_due():
            sample = Sample(self._now if self._starts else self._due)
            self.level.samples.append(sample)
            self._running[self.engine.add(self._request_of(self._number))] = sample
            self._number += 1
            if self.level.load.rate is not None:
                self._due += self._rng.expovariate(self.level.load.rate)

    def _is_due(self) -> bool:
        if self._starts:
            return len(self._running) < bisect(self._starts, self._now)
        return self._due <= self._now

    def _step(self) -> None:
        progress, now = self.engine.step(), self._now
        for gained in progress:
            sample = self._running[gained.row]
            sample.tokens += len(gained.tokens)
            if sample.ttft is None and gained.tokens:
                sample.ttft = now - sample.arrived
            if gained.finish_reason is not None:
                sample.e2e = now - sample.arrived
        for handle, result in self.engine.take_results_by_handle().items():
            stats = result.stats
            self._running.pop(handle).counts = Counts(stats.num_draft_tokens, stats.num_accepted_tokens, stats.rounds)
