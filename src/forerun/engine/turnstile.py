"""The lock of an engine: one thread steps, others add and abort between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock

NAP = 2e-5  # seconds between two looks whether a caller has got in


class Turnstile:
    """A lock that is not kept from others by a thread that takes it again the moment it lets go."""

    def __init__(self) -> None:
        self._held = RLock()  # a step may call a tokenizer or processor that aborts a row
        self._count, self._callers = Lock(), 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """For the thread that steps, again and again: whoever waits goes first."""
        while self._callers:
            time.sleep(NAP)
        with self._held:
            yield

    @contextmanager
    def calling(self) -> Iterator[None]:
        """For anybody else: waits until the step under way is over."""
        with self._count:
            self._callers += 1
        try:
            self._held.acquire()
        finally:
            with self._count:
                self._callers -= 1
        try:
            yield
        finally:
            self._held.release()
