"""Ctrl-C as a request to stop at the next round, so that no round is torn apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed. Pressed again, it interrupts as usual."""
    pressed = threading.Event()

    def note(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
