"""When kernels are compiled, and for how long: by Numba tens of seconds at a first use on a machine, then never again;
by Triton a second or more for each variant that is not on disk yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(slots=True)
class Variants:
    """Of Triton's kernels, counted for as long as they are watched."""

    num_compiled: int = 0
    num_found: int = 0  # on disk, where an earlier process has left them
    seconds: float = 0.0  # spent compiling

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's listener protocol."""
        self.num_found += cache_hit
        self.num_compiled += not cache_hit
        self.seconds += 0.0 if cache_hit else times.total / 1e6


@contextmanager
def watched_variants() -> Iterator[Variants]:
    """Count until the block ends. Whoever listens already hears nothing meanwhile; without Triton nothing happens."""
    variants = Variants()
    try:
        from triton import knobs
    except (ImportError, OSError):
        yield variants
        return
    before, knobs.compilation.listener = knobs.compilation.listener, variants
    try:
        yield variants
    finally:
        knobs.compilation.listener = before
