"""What one worker has compiled, the others find on disk: nobody compiles the same twice.

Numba compiles for one worker at a time, and the others wait: the kernels of a CPU take half a minute, and workers that
begin with them would each compile all of them. Which tests need which kernels depends on the order and on the machine.
Python's files are all needed by all workers at their start: of a fresh clone's each compiles its share.
"""

from __future__ import annotations

import compileall
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[2]


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


def compile_share(config: pytest.Config, root: Path = ROOT) -> None:
    """This worker's part of the files of the source and of the tests, where they are not compiled yet."""
    number, workers = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1 or sys.dont_write_bytecode:
        return
    files = sorted(file for folder in ("src", "tests") for file in (root / folder).rglob("*.py"))
    for file in files[int(number.removeprefix("gw")) % workers :: workers]:
        if file.name.startswith("test_") or file.name == "conftest.py":
            with suppress(AttributeError):  # inside of pytest: with other names there each worker compiles all
                _compile_test(config, file)
        else:
            compileall.compile_file(file, quiet=2)


def _compile_test(config: pytest.Config, file: Path) -> None:
    """Where pytest looks for it, with the assertions that it writes anew."""
    folder = rewrite.get_cache_dir(file)
    compiled = folder / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
