"""Processes of ours, which must not outlive whoever started them, and what they find: cores and ports.

`python -m forerun.processes PARENT SIGNAL MODULE ...` runs a module as `python -m MODULE ...` does, in a process that
gets the signal when its parent ends, even if that one was killed; `python -m forerun.processes PARENT SIGNAL --program
PATH ...` becomes another program, which keeps that. On Linux only: elsewhere it lives on.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
PROGRAM = "--program"


def bound_command(signum: signal.Signals, module: str, arguments: Sequence[str]) -> list[str]:
    """The command for a child of this process that is to end with it. The thread that starts it must live as long."""
    return [sys.executable, "-m", "forerun.processes", str(os.getpid()), signum.name, module, *arguments]


def bound_program(signum: signal.Signals, command: Sequence[str]) -> list[str]:
    """The same for a program that is not ours."""
    return bound_command(signum, PROGRAM, command)


def bind(parent: int, signum: signal.Signals) -> None:
    """Have this process get the signal when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), signum)


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Ask a child to end, and kill it where it has not after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def usable_cores() -> int:
    """Those that this process may use, where the system tells; else all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str) -> int:
    """One that nobody listens at now, for a server that takes no 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    _, parent, name, module, *arguments = sys.argv
    bind(int(parent), signal.Signals[name])
    if module == PROGRAM:
        os.execv(arguments[0], arguments)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
