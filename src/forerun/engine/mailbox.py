"""What one request gains on its way from the engine's thread to whoever reads it, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from forerun.engine.row import Progress, RowResult

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Mailbox:
    """Filled by one thread, read by any."""

    def __init__(self) -> None:
        self.gained: deque[Progress] = deque()
        self.result: RowResult | None = None
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiters: list[Waiter] = []

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be put in; what is there may still be read."""
        return self.result is not None or self.error is not None

    def put(
        self, gained: Progress | None = None, result: RowResult | None = None, error: BaseException | None = None
    ) -> list[Waiter]:
        """Something new. Returns who waits for it in an event loop, to be woken by `wake`."""
        with self._changed:
            if gained is not None:
                self.gained.append(gained)
            self.result, self.error = result or self.result, error or self.error
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        return waiters

    def take(self) -> tuple[Progress | None, bool]:
        """The next of what was gained, if there is anything, and whether nothing will follow it."""
        with self._changed:
            return self.gained.popleft() if self.gained else None, self.has_ended and not self.gained

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
