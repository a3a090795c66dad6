"""Whether a replica can go on: its engine has not ended, and comes to the end of its rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class WatchedService(Protocol):
    """What is asked of a service."""

    longest_round: float  # seconds

    @property
    def is_alive(self) -> bool: ...

    async def wait_for_round_end(self) -> None: ...


class Health:
    """Asked again and again, by one event loop. An engine without work answers at once; a service is there once
    its engine has compiled and recorded what rounds use, so none of that is taken for a round."""

    def __init__(self, service: WatchedService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._round: asyncio.Task[None] | None = None  # that the engine is in, or was when it was asked last
        self._asked = 0.0  # when that was

    def check(self) -> None:
        """Raise where the engine has ended, or has been in one round for too long."""
        if self._round is None or self._round.done():
            self._asked, self._round = self._clock(), asyncio.create_task(self._service.wait_for_round_end())
        elif self._clock() - self._asked > (limit := self._service.longest_round):
            raise RuntimeError(f"the engine has been in one round for {limit:g} s (--round-seconds)")
        if not self._service.is_alive:
            raise RuntimeError("the engine has ended")
