"""Requests that arrive at random at several copies of a target: how long they wait under each layout. A prediction.

Every copy decodes its rows round by round, as long as the formulas of `plan.devices` say. A request goes to the copy
with the fewest requests, of two that are drawn: what Ray Serve and others call power of two choices.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from forerun.plan.devices import DeviceSettings, Layout, ModelShape, pass_seconds, round_seconds

OUTPUT_SHARE = 0.25  # of the context is written, the rest is the prompt
FEWEST, MOST, SECONDS = 2000, 20000, 30.0  # requests of a simulation: as many as arrive in so long, within bounds
OVERLOADED = 1.5  # times as many requests under way when the last arrives as at half time: their number grows


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the requests of one layout met."""

    layout: Layout
    served: int
    first_token: tuple[float, float]  # seconds, median and 95th of 100
    each_token: tuple[float, float]  # seconds a token after the first
    tokens_per_second: float
    is_overloaded: bool  # the queue grew for as long as requests arrived


@dataclass(slots=True)
class _Request:
    arrived: float
    left: int  # tokens
    written: int = 0
    first: float = 0.0  # when its first tokens came
    ended: float = 0.0


@dataclass(slots=True)
class _Copy:
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    is_busy: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def simulate(shape: ModelShape, settings: DeviceSettings, layout: Layout, seed: int = 0) -> Waiting:
    """Requests of a Poisson process, until all of them are answered."""
    assert settings.rate is not None
    return _Simulation(shape, settings, layout, random.Random(seed)).run()


class _Simulation:
    def __init__(self, shape: ModelShape, settings: DeviceSettings, layout: Layout, draws: random.Random) -> None:
        self.shape, self.settings, self.layout, self.draws = shape, settings, layout, draws
        self.copies = [_Copy() for _ in range(layout.copies)]
        self.most_rows = max(1, layout.key_tokens // settings.context)
        self.ended: list[_Request] = []
        self.events: list[
            tuple[float, int, int]
        ] = []  # time, a number that makes ties definite, copy or -1: an arrival
        self._order = 0
        self._round_costs: dict[int, float] = {}
        self._prompt = settings.context - self._output
        self._prompt_cost = pass_seconds(shape, replace(settings, context=1), layout.split, 1, self._prompt)

    @property
    def _output(self) -> int:
        return max(1, int(self.settings.context * OUTPUT_SHARE))

    def run(self) -> Waiting:
        rate = self.settings.rate
        assert rate is not None
        time, arrivals = 0.0, []
        for _ in range(min(max(FEWEST, int(SECONDS * rate)), MOST)):
            time += self.draws.expovariate(rate)
            arrivals.append(time)
        for moment in arrivals:
            self._push(moment, -1)
        last = 0.0
        while self.events:
            last, _, number = heappop(self.events)
            if number < 0:
                self._arrive(last)
            else:
                self._end_round(last, number)
        return self._told(arrivals, last)

    def _push(self, time: float, number: int) -> None:
        self._order += 1
        heappush(self.events, (time, self._order, number))

    def _arrive(self, now: float) -> None:
        drawn = [self.draws.randrange(len(self.copies)) for _ in range(2)]
        number = min(drawn, key=lambda one: self.copies[one].load)
        copy = self.copies[number]
        copy.waiting.append(_Request(now, max(1, round(self.draws.expovariate(1 / self._output)))))
        if not copy.is_busy:
            self._begin_round(now, number)

    def _begin_round(self, now: float, number: int) -> None:
        """Newcomers' prompts are read first; their first token comes with the round."""
        copy, seconds = self.copies[number], 0.0
        while copy.waiting and len(copy.running) < self.most_rows:
            copy.running.append(copy.waiting.popleft())
            seconds += self._prompt_cost
        copy.is_busy = bool(copy.running)
        if copy.is_busy:
            self._push(now + seconds + self._round(len(copy.running)), number)

    def _round(self, rows: int) -> float:
        if rows not in self._round_costs:
            self._round_costs[rows] = round_seconds(self.shape, self.settings, self.layout.split, rows)
        return self._round_costs[rows]

    def _end_round(self, now: float, number: int) -> None:
        copy = self.copies[number]
        for request in copy.running:
            gained = 1
            while gained <= self.settings.draft_length and self.draws.random() < self.settings.alpha:
                gained += 1
            gained = min(gained, request.left)
            request.first = request.first or now
            request.left -= gained
            request.written += gained
            request.ended = now
        self.ended += [request for request in copy.running if not request.left]
        copy.running = [request for request in copy.running if request.left]
        self._begin_round(now, number)

    def _told(self, arrivals: list[float], end: float) -> Waiting:
        firsts = [request.first - request.arrived for request in self.ended]
        each = [
            (request.ended - request.first) / (request.written - 1) for request in self.ended if request.written > 1
        ]
        return Waiting(
            self.layout,
            len(self.ended),
            _percentiles(firsts),
            _percentiles(each or [0.0]),
            sum(request.written for request in self.ended) / end,
            self._under_way(arrivals[-1]) > OVERLOADED * max(self._under_way(arrivals[len(arrivals) // 2]), 10),
        )

    def _under_way(self, moment: float) -> int:
        return sum(request.arrived <= moment < request.ended for request in self.ended)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
