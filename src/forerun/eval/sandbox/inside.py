"""The sandboxed process: put up the walls, run the program, report the verdict through a pipe of its own.

Needs nothing but the standard library; `forerun.eval.sandbox.run` starts it.
"""

from __future__ import annotations

import _thread
import math
import os
from collections import deque
from contextlib import suppress
from functools import partial
from operator import call
from typing import Any, NoReturn

from forerun.eval.sandbox import audit, landlock, privileges, seccomp  # now: the walls hide Forerun's own files

MESSAGE = 300
"""Characters of an error's text that are reported."""
FILE_BYTES = 1 << 20
OPEN_FILES = 64
PROCESSES = 64
NONCE_BYTES = 33
"""Of the line that says "passed"; on stdin the program follows it."""


def main(folder: str, status: int, memory: int, seconds: float) -> None:
    """Everything the program prints is thrown away, and there is nothing to read from stdin.

    The program runs in a thread that is no main thread: signal handlers, which see frames of others, are not its own.
    """
    waiting, begin, forever = [map(call, _steps(status))], _held_lock(), _held_lock()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    walls = _private_walls(folder)
    _thread.start_new_thread(_run, (waiting, status, begin))
    walls += _shared_walls(folder, memory, seconds, "landlock" in walls)
    _report(status, "walls", " ".join(walls))
    # What stands first lies on this frame's stack meanwhile, where nothing can look. Without it, the steps would be
    # given back once one has raised, and a program can read memory that was given back.
    _held = waiting[0], _wait(begin, forever)


def _wait(begin: Any, forever: Any) -> NoReturn:
    """Let the program begin; this does not return."""
    leave = os._exit
    try:
        begin.release()
        forever.acquire()
    finally:  # an interrupt by the program
        leave(0)


def _steps(status: int) -> list[partial[Any]]:
    """What is to be done one after the other until something raises: the program, and to say that it passed.

    Between them no Python runs that the program could have put in its place, and nothing it can look at leads here:
    no frame, no module, no trace, no buffer of a file, no memory that was given back (`main` holds them to the end).
    What lists the objects of this process is refused by the audit hook.
    """
    passed = os.read(0, NONCE_BYTES)  # straight into the object that is written in the end
    with open(0, "rb", closefd=False) as rest:
        program = rest.read().decode("utf-8", "surrogatepass")
    return [partial(exec, program, {"__name__": "program"}), partial(os.write, status, passed), partial(os._exit, 0)]


def _held_lock() -> Any:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _run(waiting: list[Any], status: int, begin: Any) -> None:
    """Take the steps; tell what the program raised. Whatever it does with what it finds in this frame is no pass."""
    leave = os._exit
    begin.acquire()
    try:
        deque(waiting.pop(), 0)
        _report(status, "raised", "StopIteration: ")  # the one error that ends steps without a word
    except BaseException as error:
        _report(status, "raised", _describe(error))
    finally:  # threads, exit handlers and whatever prints errors, which the program may have left behind, have no say
        leave(0)


def _describe(error: BaseException) -> str:
    text = ""
    with suppress(BaseException):  # the program may have written its own __str__
        text = str(error)[:MESSAGE]
    return f"{type(error).__name__}: {text}"[:MESSAGE]


def _report(status: int, what: str, text: str) -> None:
    line = text.replace("\n", "\\n")
    os.write(status, f"{what}: {line}\n".encode(errors="backslashreplace"))


def _private_walls(folder: str) -> list[str]:
    """Those that are a thread's own and inherited by the threads it starts."""
    return _standing({"landlock": landlock.install(folder), "privileges": privileges.drop()})


def _shared_walls(folder: str, memory: int, seconds: float, files_are_watched: bool) -> list[str]:
    """Those of the whole process."""
    limited = _limit(_own_limits(memory, seconds))
    filtered = seccomp.install(files_are_watched=files_are_watched)
    if not filtered:
        # Nothing else keeps the program from starting processes. Only here, because Linux counts all threads of the
        # user: where many run, none would be left for an honest program. What one has itself is the watcher's to count.
        limited = _limit({"RLIMIT_NPROC": PROCESSES}) and limited
    hooked = audit.install(folder, files_are_watched=files_are_watched)
    return _standing({"limits": limited, "seccomp": filtered, "audit": hooked})


def _standing(walls: dict[str, bool]) -> list[str]:
    return [name for name, stands in walls.items() if stands]


def _own_limits(memory: int, seconds: float) -> dict[str, int]:
    """Memory, processor time, size and number of files; no core dumps."""
    cpu = math.ceil(seconds) + 1
    limits = {"RLIMIT_AS": memory, "RLIMIT_DATA": memory, "RLIMIT_CPU": cpu, "RLIMIT_FSIZE": FILE_BYTES}
    return limits | {"RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0}


def _limit(wanted: dict[str, int]) -> bool:
    """True if all were accepted."""
    import resource

    accepted = 0
    for name, value in wanted.items():
        with suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (value, value))
            accepted += 1
    return accepted == len(wanted)
