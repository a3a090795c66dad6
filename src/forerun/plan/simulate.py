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
from math import exp

from forerun.plan.devices import DeviceLayout, DeviceSettings, ModelShape, pass_seconds, round_seconds

OUTPUT_SHARE = 0.25  # of the context is written, the rest is the prompt
BEFORE = -1.0  # when requests arrived that are there at the beginning: they are not told of
FEWEST, MOST, SECONDS = 2000, 20000, 30.0  # requests of a simulation: as many as arrive in so long, within bounds
MOST_ROUNDS, LEAST = 3_000_000, 200  # rounds of all of them, some seconds' work: fewer requests where answers are long


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the requests of one layout met."""

    layout: DeviceLayout
    served: int
    first_token: tuple[float, float]  # seconds, median and 95th of 100
    each_token: tuple[float, float]  # seconds a token after the first
    tokens_per_second: float  # while requests arrived
    is_overloaded: bool  # more arrive than copies with as many rows as they have room for can answer


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


def simulate(shape: ModelShape, settings: DeviceSettings, layout: DeviceLayout, seed: int = 0) -> Waiting:
    """Requests of a Poisson process, until all of them are answered. Copies begin with the rows that they have in the
    long run, so that answers which take longer than requests are simulated for do not look like an idle machine."""
    assert settings.rate is not None
    return _Simulation(shape, settings, layout, random.Random(seed)).run()


class _Simulation:
    def __init__(self, shape: ModelShape, settings: DeviceSettings, layout: DeviceLayout, draws: random.Random) -> None:
        self.shape, self.settings, self.layout, self.draws = shape, settings, layout, draws
        self.copies = [_Copy() for _ in range(layout.copies)]
        self.most_rows = max(1, layout.key_tokens // settings.context)
        self.ended: list[_Request] = []
        self.events: list[
            tuple[float, int, int]
        ] = []  # time, a number that makes ties definite, copy or -1: an arrival
        self._order, self._tokens = 0, 0
        self._round_costs: dict[int, float] = {}
        self._prompt = settings.context - self._output
        self._prompt_cost = pass_seconds(shape, replace(settings, context=1), layout.split, 1, self._prompt)

    @property
    def _output(self) -> int:
        return max(1, int(self.settings.context * OUTPUT_SHARE))

    def run(self) -> Waiting:
        rate, steady = self._rate, self.steady_rows
        time, arrivals = 0.0, []
        for _ in range(self._requests):
            time += self.draws.expovariate(rate)
            arrivals.append(time)
        for moment in arrivals:
            self._push(moment, -1)
        for number in range(len(self.copies) if steady is not None else 0):
            self._fill(number, steady or 0.0)
        while self.events:
            now, _, number = heappop(self.events)
            if number < 0:
                self._arrive(now)
            else:
                self._end_round(now, number, now <= arrivals[-1])
        return self._told(arrivals[-1], steady is None)

    @property
    def _requests(self) -> int:
        asked = min(max(FEWEST, int(SECONDS * self._rate)), MOST)
        return min(asked, max(LEAST, int(MOST_ROUNDS / self._rounds)))

    @property
    def _rate(self) -> float:
        assert self.settings.rate is not None
        return self.settings.rate

    @property
    def steady_rows(self) -> float | None:
        """Rows that a copy has in the long run, on average; None where their number grows for ever.

        With n rows a round lasts t(n), and longer by the prompts that are read meanwhile. As many requests come in the
        time that one takes as leave: n = arrivals * rounds * t(n) / (1 - arrivals * prompt). t(n) / n falls with n, so
        this has a solution where the most rows there is room for suffice.
        """
        arrivals = self._rate / len(self.copies)
        free = 1 - arrivals * self._prompt_cost
        if free <= 0:
            return None
        rows, before = 0.0, -1.0
        while rows - before > 1e-6 * max(rows, 1.0):
            before = rows
            rows = arrivals * self._rounds * self._round_of(max(rows, 1.0)) / free
            if rows > self.most_rows:
                return None
        return rows

    @property
    def _rounds(self) -> float:
        """Expected of a request. Lengths are exponential, so each round is the last one with the same chance."""
        alpha, drafted = self.settings.alpha, self.settings.draft_length
        chances = [alpha**kept * (1 - alpha) for kept in range(drafted)] + [alpha**drafted]
        goes_on = sum(chance * exp(-(kept + 1) / self._output) for kept, chance in enumerate(chances))
        return 1 + exp(-0.5 / self._output) * goes_on / (1 - goes_on)

    def _fill(self, number: int, rows: float) -> None:
        """Somewhere in a round; what is left of exponential lengths is exponential."""
        copy, whole = self.copies[number], int(rows)
        whole += self.draws.random() < rows - whole
        copy.running = [_Request(BEFORE, self._length()) for _ in range(whole)]
        copy.is_busy = whole > 0
        if copy.is_busy:
            self._push(self.draws.random() * self._round(whole), number)

    def _length(self) -> int:
        return max(1, round(self.draws.expovariate(1 / self._output)))

    def _push(self, time: float, number: int) -> None:
        self._order += 1
        heappush(self.events, (time, self._order, number))

    def _arrive(self, now: float) -> None:
        drawn = [self.draws.randrange(len(self.copies)) for _ in range(2)]
        number = min(drawn, key=lambda one: self.copies[one].load)
        copy = self.copies[number]
        copy.waiting.append(_Request(now, self._length()))
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
            self._round_costs[rows] = self._round_of(rows)
        return self._round_costs[rows]

    def _round_of(self, rows: float) -> float:
        return round_seconds(self.shape, self.settings, self.layout.split, rows)

    def _end_round(self, now: float, number: int, is_counted: bool) -> None:
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
            self._tokens += gained * is_counted
        self.ended += [request for request in copy.running if not request.left]
        copy.running = [request for request in copy.running if request.left]
        self._begin_round(now, number)

    def _told(self, seconds: float, is_overloaded: bool) -> Waiting:
        ended = [request for request in self.ended if request.arrived > BEFORE]
        firsts = [request.first - request.arrived for request in ended]
        each = [(request.ended - request.first) / (request.written - 1) for request in ended if request.written > 1]
        return Waiting(
            self.layout,
            len(ended),
            _percentiles(firsts),
            _percentiles(each or [0.0]),
            self._tokens / seconds,
            is_overloaded,
        )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
