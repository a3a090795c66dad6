"""Which variants of its kernels Triton is asked for: compiling one takes a second or more, finding it on disk none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Variants:
    """Counted for as long as they are watched."""

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
