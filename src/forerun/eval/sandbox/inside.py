"""The sandboxed process: put up the walls, run the program, report the verdict through a pipe of its own.

Needs nothing but the standard library; `forerun.eval.sandbox.run` starts it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from typing import Any

MESSAGE = 300
"""Characters of an error's text that are reported."""
FILE_BYTES = 1 << 20
OPEN_FILES = 64


def main(folder: str, status: int, memory: int, seconds: float) -> None:
    """Everything the program prints is thrown away, and there is nothing to read from stdin."""
    request = json.load(sys.stdin)
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.path[:] = [place for place in sys.path if place not in request["hidden"]]
    _report(status, {"walls": _walls(folder, memory, seconds)})
    _report(status, {"nonce": request["nonce"], **_verdict(request["program"])})
    os._exit(0)  # threads and exit handlers that the program left behind have no say


def _verdict(program: str) -> dict[str, Any]:
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), {"__name__": "program"})
    except BaseException as error:
        return {"passed": False, "message": _describe(error)}
    return {"passed": True, "message": ""}


def _describe(error: BaseException) -> str:
    text = ""
    with suppress(BaseException):  # the program may have written its own __str__
        text = str(error)[:MESSAGE]
    return f"{type(error).__name__}: {text}"[:MESSAGE]


def _report(status: int, content: dict[str, Any]) -> None:
    os.write(status, json.dumps(content).encode() + b"\n")


def _walls(folder: str, memory: int, seconds: float) -> list[str]:
    """Put up all there are; the names of those that stand."""
    from forerun.eval.sandbox import audit, landlock, seccomp

    limited = _limit(memory, seconds)
    watched = landlock.install(folder)
    filtered = seccomp.install(files_are_watched=watched)
    standing = {"limits": limited, "landlock": watched, "seccomp": filtered, "audit": audit.install(folder)}
    return [name for name, stands in standing.items() if stands]


def _limit(memory: int, seconds: float) -> bool:
    """Memory, processor time, size and number of files, processes; no core dumps. True if all were accepted."""
    import resource

    cpu = math.ceil(seconds) + 1
    wanted = {"RLIMIT_AS": memory, "RLIMIT_DATA": memory, "RLIMIT_CPU": cpu, "RLIMIT_FSIZE": FILE_BYTES}
    wanted |= {"RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_NPROC": OPEN_FILES, "RLIMIT_CORE": 0}
    accepted = 0
    for name, value in wanted.items():
        with suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (value, value))
            accepted += 1
    return accepted == len(wanted)
