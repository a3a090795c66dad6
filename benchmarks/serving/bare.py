"""The engine by itself under a load that clients have sent before: no server, no thread, no client."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forerun.bench.serve.load import Level
from forerun.bench.serve.samples import Counts, Sample
from forerun.engine import Engine, Request


class BareLoad:
    """Requests by number, each at the time at which a client has sent it; samples are there as soon as begun.

    Of a fixed number at a time, a next request that came the moment another ended would always meet the beginning of a
    round, and wait less than any client's can: clients hear of an end while the next round is under way.
    """

    def __init__(
        self, engine: Engine, level: Level, request_of: Callable[[int], Request], sent: Sequence[float]
    ) -> None:
        self.engine, self.level = engine, level
        self._request_of, self._sent = request_of, sent
        self._running: dict[int, Sample] = {}  # by handle
        self._started = 0.0

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._started

    @property
    def _number(self) -> int:
        """Of the next request."""
        return len(self.level.samples)

    def run(self) -> None:
        self._started = time.perf_counter()
        self.engine.arrivals = self._add_due  # whoever comes during a round is heard of as an AsyncEngine hears of it
        try:
            while self._number < len(self._sent) or not self.engine.is_idle:
                self._add_due()
                if not self.engine.is_idle:
                    self._step()
                    self.level.seconds = self._now
                else:
                    time.sleep(max(self._sent[self._number] - self._now, 0.0))
        finally:
            self.engine.arrivals = None

    def _add_due(self) -> None:
        """All that were sent by now."""
        while self._number < len(self._sent) and self._sent[self._number] <= self._now:
            number, sample = self._number, Sample(self._sent[self._number])
            self.level.samples.append(sample)
            self._running[self.engine.add(self._request_of(number))] = sample

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
