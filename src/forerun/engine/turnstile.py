"""The lock of an engine: one thread steps, others add and abort between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

NAP = 2e-5  # seconds between two looks whether a caller has got in


class Turnstile:
    """A lock that is not kept from others by a thread that takes it again the moment it lets go."""

    def __init__(self) -> None:
        self._held = RLock()  # a step may call a tokenizer or processor that aborts a row
        self._callers: set[object] = set()  # who waits: a Ctrl-C must not leave a count that nobody takes back
        self._stepper: int | None = None  # the thread that steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """For the thread that steps, again and again: whoever waits already goes first, and nobody who comes later."""
        first = self._callers.copy()
        while not first.isdisjoint(self._callers):
            time.sleep(NAP)
        try:
            with self._held:
                self._stepper = get_ident()
                yield
        finally:
            self._stepper = None

    @property
    def is_stepping(self) -> bool:
        """Whether the caller's own thread is in the middle of a step."""
        return self._stepper == get_ident()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """For anybody else: waits until the step under way is over, unless that step is what calls."""
        caller = object()
        try:
            self._callers.add(caller)
            with self._held:
                self._callers.discard(caller)
                yield
        finally:
            self._callers.discard(caller)
