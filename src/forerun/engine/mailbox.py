"""What one request gains on its way from the engine's thread to whoever reads it, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from forerun.engine.row import Progress, RowResult

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Receiver(ABC):
    """Whoever is told what one request gains, by the engine's thread."""

    @abstractmethod
    def put(
        self, gained: Progress | None = None, result: RowResult | None = None, error: BaseException | None = None
    ) -> list[Waiter]:
        """Something new; a result or an error is the last. Returns who is to be woken in event loops by `wake`."""

    def due(self, now: float, pace: float) -> list[Waiter]:
        """Who is to be woken for what was gained, if they have not been for `pace` seconds."""
        return []


class Mailbox(Receiver):
    """Filled by one thread, read by any."""

    def __init__(self) -> None:
        self.gained: deque[Progress] = deque()
        self.result: RowResult | None = None
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiters: list[Waiter] = []
        self._woken = -math.inf  # when those that wait in event loops were woken last

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be put in; what is there may still be read."""
        return self.result is not None or self.error is not None

    def put(
        self, gained: Progress | None = None, result: RowResult | None = None, error: BaseException | None = None
    ) -> list[Waiter]:
        """Wakes threads at once, and of an end all who wait in event loops."""
        with self._changed:
            if gained is not None:
                self.gained.append(gained)
            self.result, self.error = result or self.result, error or self.error
            self._changed.notify_all()
            return self._take_waiters() if self.has_ended else []

    def due(self, now: float, pace: float) -> list[Waiter]:
        if not self._waiters or now < self._woken + pace:  # somebody who begins to wait now looks by himself
            return []
        with self._changed:
            if not self.gained:
                return []
            self._woken = now
            return self._take_waiters()

    def _take_waiters(self) -> list[Waiter]:
        waiters, self._waiters = self._waiters, []
        return waiters

    def take(self) -> tuple[Progress | None, bool]:
        """The next of what was gained, if there is anything, and whether nothing will follow it."""
        with self._changed:
            return self.gained.popleft() if self.gained else None, self.has_ended and not self.gained

    def take_all(self) -> list[Progress]:
        """Whatever was gained."""
        with self._changed:
            gained = list(self.gained)
            self.gained.clear()
            return gained

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `ready()`, in a thread; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(ready, timeout)

    async def wait_in_loop(self, ready: Callable[[], bool]) -> None:
        """The same in an event loop, which goes on with other things meanwhile."""
        while True:
            with self._changed:
                if ready():
                    return
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter


def wake(waiters: Iterable[Waiter]) -> None:
    """One call for each event loop, however many of its tasks wait."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
    for loop, waiter in waiters:
        by_loop[loop].append(waiter)
    for loop, futures in by_loop.items():
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # the task that waited may have been cancelled
            future.set_result(None)
