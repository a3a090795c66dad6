"""Numba compiles for one worker at a time: the others wait, and find on disk what it has made.

The kernels of a CPU take half a minute, and workers that begin with them would each compile all of them. Which tests
need which kernels depends on the order and on the machine; that nobody compiles the same twice does not.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


class Turns:
    """A lock between the processes that have the same `file`, which a thread may take again while it has it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("rb")
        self._thread, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._thread.acquire()
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._thread.release()

    def taken(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compile_)
        def in_turn(*arguments: Any) -> Any:
            with self:  # from looking on disk to writing there
                return compile_(*arguments)

        return in_turn


def in_turns() -> None:
    """From now on, in this process."""
    from numba.core.ccallback import CFunc
    from numba.core.dispatcher import Dispatcher

    import forerun

    turns = Turns(Path(forerun.__file__))
    for kind in (Dispatcher, CFunc):
        kind.compile = turns.taken(kind.compile)  # type: ignore[method-assign]
