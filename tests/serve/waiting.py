"""How long the work of one thread keeps others waiting, in one process."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_WAIT = 0.05  # seconds


@contextmanager
def switching() -> Iterator[None]:
    """Between threads as often as a server does, which also leaves what was there before out of collecting garbage."""
    gc.collect()
    gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def longest_wait(work: Callable[[], object]) -> float:
    """Seconds of work, by the processor's clock, between two looks of a thread that looks every millisecond."""
    worst, is_over = 0.0, threading.Event()

    def look() -> None:
        nonlocal worst
        last = time.process_time()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.process_time()
            worst, last = max(worst, now - last), now

    looking = threading.Thread(target=look)
    looking.start()
    time.sleep(0.01)
    try:
        work()
    except Exception as error:
        assert type(error).__name__ == "InvalidBody"
    is_over.set()
    looking.join()
    return worst
