"""When Numba compiles, and for how long: tens of seconds at a kernel's first use on a machine, then never again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVENT = "numba:compile"


class CompileTimer:
    """Seconds spent compiling; `on_start` is called whenever a compilation begins that is not part of another."""

    def __init__(self, on_start: Callable[[], None] | None = None) -> None:
        self.seconds = 0.0
        self._on_start = on_start
        self._depth = 0  # a kernel that calls others has them compiled while it is compiled itself
        self._started = 0.0

    def notify(self, event: Any) -> None:
        """Numba's listener protocol."""
        if event.is_start:
            self._depth += 1
            if self._depth == 1:
                self._started = time.perf_counter()
                if self._on_start is not None:
                    self._on_start()
        elif self._depth:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - self._started


@contextmanager
def compile_timer(on_start: Callable[[], None] | None = None) -> Iterator[CompileTimer]:
    """Watch compilations until the block ends. Kernels that are found in Numba's cache on disk cause none."""
    timer = CompileTimer(on_start)
    try:
        from numba.core import event
    except (ImportError, OSError):  # without Numba nothing is compiled
        yield timer
        return
    event.Listener.register(CompileTimer)
    event.register(EVENT, timer)
    try:
        yield timer
    finally:
        event.unregister(EVENT, timer)
