"""Is anybody else at work on this machine? Then timings say little."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
LOOK = 0.5  # seconds
TOLERATED = 0.15  # cores that others may keep busy: the system itself is never quite still


def note(when: str = "began") -> str | None:
    """A warning for the record where other programs are running; None where all is quiet, or nothing is known."""
    busy = others()
    if busy is None or busy <= TOLERATED:
        return None
    return f"other programs kept {busy:.1f} cores busy when this {when}: repeat it on a quiet machine"


def others(seconds: float = LOOK) -> float | None:
    """Cores that other processes keep busy, looked at for a moment; None where the system does not tell."""
    before = _busy_seconds()
    if before is None:
        return None
    started = time.perf_counter()
    time.sleep(seconds)
    passed, after = time.perf_counter() - started, _busy_seconds()
    return None if after is None else max(0.0, (after - before) / passed)


def _busy_seconds() -> float | None:
    """Seconds all processors together have worked since they were started, our own left out."""
    try:
        user, nice, system, _idle, _waiting, *rest = map(int, STAT.read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError, IndexError):
        return None
    ticks = user + nice + system + sum(rest[:2])  # then come interrupts; guests are counted in `user` already
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
