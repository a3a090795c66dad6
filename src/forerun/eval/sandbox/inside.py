"""The sandboxed process: put up the walls, run the program, report the verdict through a pipe of its own.

Needs nothing but the standard library; `forerun.eval.sandbox.run` starts it.
"""

from __future__ import annotations

import _thread
import json
import math
import os
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from operator import call
from typing import Any

MESSAGE = 300
"""Characters of an error's text that are reported."""
FILE_BYTES = 1 << 20
OPEN_FILES = 64
PROCESSES = 64
TRUTH = ("true", "false")


def main(folder: str, status: int, memory: int, seconds: float) -> None:
    """Everything the program prints is thrown away, and there is nothing to read from stdin.

    The program runs in a thread of its own, whose frames lead to nothing that makes a verdict valid: the nonce and the
    lock that says "passed" are locals of this frame, which the audit hook keeps out of reach. After the program this
    frame calls nothing that is written in Python, for the program may have put functions of its own in its place.
    """
    request = json.load(sys.stdin)
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    write, leave, kind, text = os.write, os._exit, type, bytes
    passing, failing = (f', "nonce": "{request["nonce"]}", "passed": {verdict}}}\n'.encode() for verdict in TRUTH)
    passed, ended, messages = _held_lock(), _held_lock(), list[bytes]()
    begin = _held_lock()
    # The lock is released by C code that goes on only if the program raised nothing; no frame of Python's holds it.
    steps = [partial(exec, request.pop("program"), {"__name__": "program"}), passed.release]
    waiting = [map(call, steps)]
    walls = _private_walls(folder)
    _thread.start_new_thread(_run, (waiting, messages, begin, ended))
    _report(status, {"walls": [*walls, *_shared_walls(folder, memory, seconds, "landlock" in walls)]})
    try:
        begin.release()
        ended.acquire()
        message = messages[0] if messages and kind(messages[0]) is text else b'""'
        write(status, b'{"message": ' + message + (passing if passed.acquire(False) else failing))
    finally:  # threads, exit handlers and whatever prints errors, which the program may have left behind, have no say
        leave(0)


def _held_lock() -> Any:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _run(waiting: list[Any], messages: list[bytes], begin: Any, ended: Any) -> None:
    """Run the program and tell what it raised. Whatever it does with what it finds in this frame is no pass."""
    begin.acquire()
    try:
        deque(waiting.pop(), 0)
    except BaseException as error:
        messages.append(json.dumps(_describe(error)).encode())
    finally:  # even if the program has broken what describes errors
        ended.release()


def _describe(error: BaseException) -> str:
    text = ""
    with suppress(BaseException):  # the program may have written its own __str__
        text = str(error)[:MESSAGE]
    return f"{type(error).__name__}: {text}"[:MESSAGE]


def _report(status: int, content: dict[str, Any]) -> None:
    os.write(status, json.dumps(content).encode() + b"\n")


def _private_walls(folder: str) -> list[str]:
    """Those that are a thread's own and inherited by the threads it starts."""
    from forerun.eval.sandbox import landlock, privileges

    return _standing({"landlock": landlock.install(folder), "privileges": privileges.drop()})


def _shared_walls(folder: str, memory: int, seconds: float, files_are_watched: bool) -> list[str]:
    """Those of the whole process."""
    from forerun.eval.sandbox import audit, seccomp

    limited = _limit(_own_limits(memory, seconds))
    filtered = seccomp.install(files_are_watched=files_are_watched)
    if not filtered:
        # Nothing else keeps the program from starting processes. Only here, because Linux counts all threads of the
        # user: where many run, none would be left for an honest program. What one has itself is the watcher's to count.
        limited = _limit({"RLIMIT_NPROC": PROCESSES}) and limited
    return _standing({"limits": limited, "seccomp": filtered, "audit": audit.install(folder)})


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
