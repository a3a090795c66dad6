"""The engine by itself under the load that clients bring to its server: no server, no thread, no client."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from forerun.bench.serve.load import LoadLevel
from forerun.bench.serve.samples import Counts, RequestSample
from forerun.engine import Engine, Request

HEARD = 0.001  # seconds after which a client hears of an end and its next request is there


class BareLoad:
    """Requests by number; samples are there as soon as begun.

    Arrivals come at the times at which clients sent them. Of a fixed number at a time, each comes when another has
    ended, as it did for the clients: sent at their times, an engine that is a little slower than the server was would
    have ever more rows, and one that is faster ever fewer. Not at the very moment, which would always be the
    beginning of a round: clients hear of an end while the next round is under way.
    """

    def __init__(
        self, engine: Engine, level: LoadLevel, requests: Sequence[Request], sent: Sequence[float], seconds: float
    ) -> None:
        self.engine, self.level = engine, level
        self._requests, self._seconds = requests, seconds
        self._due = list(sent) if level.load.concurrency is None else level.load.starts  # a heap: it is in order
        self._running: dict[int, RequestSample] = {}  # by handle
        self._started = 0.0

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._started

    def run(self) -> None:
        self._started = time.perf_counter()
        self.engine.arrivals = self._add_due  # whoever comes during a round is heard of as an AsyncEngine hears of it
        try:
            while self._due or not self.engine.is_idle:
                self._add_due()
                if not self.engine.is_idle:
                    self._step()
                    self.level.seconds = self._now
                else:
                    time.sleep(max(self._due[0] - self._now, 0.0))
        finally:
            self.engine.arrivals = None

    def _add_due(self) -> None:
        """All that are there by now."""
        while self._due and self._due[0] <= self._now:
            number, sample = len(self.level.samples), RequestSample(heapq.heappop(self._due))
            self.level.samples.append(sample)
            self._running[self.engine.add(self._requests[number])] = sample

    def _step(self) -> None:
        progress, now = self.engine.step(), self._now
        for gained in progress:
            sample = self._running[gained.row]
            sample.tokens += len(gained.tokens)
            if sample.ttft is None and gained.tokens:
                sample.ttft = now - sample.arrived
            if gained.finish_reason is not None:
                sample.e2e = now - sample.arrived
                self._follow(now)
        for handle, result in self.engine.take_results_by_handle().items():
            stats = result.stats
            self._running.pop(handle).counts = Counts(stats.num_draft_tokens, stats.num_accepted_tokens, stats.rounds)

    def _follow(self, now: float) -> None:
        """The next request of a client whose last one has ended, as long as clients go on."""
        begun = len(self.level.samples) + len(self._due)
        if self.level.load.concurrency is not None and now + HEARD <= self._seconds and begun < len(self._requests):
            heapq.heappush(self._due, now + HEARD)
