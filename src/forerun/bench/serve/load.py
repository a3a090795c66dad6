"""Levels of load: so many requests under way at a time, or so many a second that arrive when they like."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from forerun.bench.serve.samples import RequestSample

SendOne = Callable[[int, RequestSample], Awaitable[None]]
"""Sends the request with this number and fills in its sample."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One of both: a fixed number under way, or a rate of arrivals."""

    concurrency: int | None = None
    rate: float | None = None  # a second
    ramp: float = 0.0  # seconds over which a fixed number begin, one after the other; then none waits for all others

    @property
    def starts(self) -> list[float]:
        """When each of a fixed number begins, in seconds."""
        number = self.concurrency or 0
        return [self.ramp * place / number for place in range(number)]

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "all at once" if self.rate == math.inf else f"{self.rate:g} a second"


@dataclass(slots=True)
class LoadLevel:
    """A load, whether requests ask for drafts, and what came of it."""

    load: ServerLoad
    speculation: str | None  # on, off, or None: the server decides
    samples: list[RequestSample]
    seconds: float = 0.0  # from the first request's sending to the last one's end

    @property
    def name(self) -> str:
        return self.load.name if self.speculation is None else f"{self.load.name}, drafts {self.speculation}"


async def run_level(level: LoadLevel, send: SendOne, requests: int, seconds: float, rng: random.Random) -> None:
    """Send until there were enough or the time is over, and wait for the last. Samples are there as soon as sent."""
    started = time.perf_counter()
    numbers = _numbers(requests, started + seconds)

    async def one(number: int) -> None:
        sample = RequestSample(time.perf_counter() - started)
        level.samples.append(sample)
        try:
            await send(number, sample)
        finally:
            level.seconds = time.perf_counter() - started

    async def worker(start: float) -> None:
        await asyncio.sleep(max(0.0, started + start - time.perf_counter()))
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as tasks:
        if level.load.concurrency is not None:
            for start in level.load.starts:
                tasks.create_task(worker(start))
            return
        assert level.load.rate is not None
        due = started
        for number in numbers:
            tasks.create_task(one(number))
            due += 0.0 if level.load.rate == math.inf else rng.expovariate(level.load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


def _numbers(requests: int, deadline: float) -> Iterator[int]:
    """Of requests to send, until the deadline; workers share it."""
    for number in range(requests):
        if time.perf_counter() > deadline:
            return
        yield number
