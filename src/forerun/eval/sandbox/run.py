"""Run a program in a sandbox and say whether it passed. Whatever it does, this returns in time."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import forerun
from forerun.errors import ForerunError
from forerun.eval.sandbox.folder import DISK_BYTES, remove, usage

SOURCE = str(Path(forerun.__file__).resolve().parents[1])
# What is put on the path is taken off again, once: as a wheel Forerun lies where what programs may import lies, too.
STARTER = (
    "import sys; sys.path.insert(0, {source!r}); from forerun.eval.sandbox.inside import main; "
    "sys.path.remove({source!r}); main({folder!r}, {status}, {memory}, {seconds})"
)
REPORT_BYTES = 16384
WALLS, RAISED = b"walls: ", b"raised: "  # how lines of the report begin
THREADS = 256
"""Of one program. With stacks of the usual size, 8 MiB, its memory ends at half as many."""
TICK = 0.1
STARTING = 10.0
"""Seconds for the interpreter to start and to put up the walls; the program's own time begins after that."""


class Ending(StrEnum):
    """How a program's run ended."""

    PASSED = "passed"
    FAILED = "failed"  # an exception, sys.exit included
    TIME = "out of time"
    DIED = "died"  # ended without a verdict: a crash, os._exit, or killed by a limit
    DISK = "wrote too much"
    THREADS = "too many threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What a program may use up."""

    seconds: float = 5.0
    memory_mib: int = 1024


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What became of a program."""

    ending: Ending
    message: str = ""
    walls: tuple[str, ...] = ()  # those that stood while it ran

    @property
    def passed(self) -> bool:
        return self.ending is Ending.PASSED


def run_program(program: str, limits: ProgramLimits | None = None) -> ProgramOutcome:
    """`program` passes if it runs to its end without an exception.

    It has a temporary folder to write to, no network, no other processes and nothing to read; its output is thrown
    away. The folder and every process of its group are gone afterwards.
    """
    limits = limits or ProgramLimits()
    if os.name != "posix":
        raise ForerunError("running generated code needs Linux or macOS; score this task there, or in a container")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="forerun-"))
    try:
        return _run_in(folder, program, limits)
    finally:
        remove(folder)


def _run_in(folder: str, program: str, limits: ProgramLimits) -> ProgramOutcome:
    nonce = secrets.token_hex(16).encode() + b"\n"
    reading, writing = os.pipe()
    try:
        try:
            process = _start(folder, program, nonce, writing, limits)
        finally:
            os.close(writing)
        try:
            watched = _watch(reading, process.pid, folder, limits)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
            process.wait()
    finally:
        os.close(reading)
    return _outcome(watched, nonce, process.returncode)


def _start(folder: str, program: str, nonce: bytes, status: int, limits: ProgramLimits) -> subprocess.Popen[bytes]:
    """Isolated from the environment and from the caller's session; other files of ours are closed."""
    command = STARTER.format(
        source=SOURCE, folder=folder, status=status, memory=limits.memory_mib << 20, seconds=limits.seconds
    )
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    one["MALLOC_ARENA_MAX"] = "1"  # glibc takes 64 MiB of addresses for a thread, eight times a core: they count, too
    with tempfile.TemporaryFile() as request:
        request.write(nonce + program.encode("utf-8", "surrogatepass"))
        request.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", command],
            stdin=request,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **one},
            pass_fds=(status,),
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True)
class _Watched:
    report: bytes
    stopped: Ending | None  # why it was stopped from outside


def _watch(reading: int, pid: int, folder: str, limits: ProgramLimits) -> _Watched:
    """Read the reports until the process closes its pipe, or until it has had enough of something."""
    report, deadline, begun = b"", time.monotonic() + STARTING, False
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return _Watched(report, Ending.TIME)
        if not select.select([reading], [], [], min(left, TICK))[0]:
            if usage(folder) > DISK_BYTES:
                return _Watched(report, Ending.DISK)
            if _threads(pid) > THREADS:
                return _Watched(report, Ending.THREADS)
            continue
        part = os.read(reading, REPORT_BYTES)
        report += part
        if not part or len(report) > REPORT_BYTES:
            return _Watched(report, None)
        if not begun and b"\n" in report:
            begun, deadline = True, time.monotonic() + limits.seconds


def _threads(pid: int) -> int:
    """How many a process has; 0 where the system does not say."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Threads:"):
                return int(line.split()[1])
    return 0


def _outcome(watched: _Watched, nonce: bytes, code: int) -> ProgramOutcome:
    """The walls, told before the program begins; then the nonce, or what the program raised."""
    first, *lines = watched.report.split(b"\n")
    if not first.startswith(WALLS):
        raise ForerunError(
            f"the sandbox did not start (exit code {code}); generated code cannot be run here. Score this task on a "
            "machine where Python may start processes and limit their memory"
        )
    walls = tuple(first.removeprefix(WALLS).decode().split())
    if nonce.strip() in lines:
        return ProgramOutcome(Ending.PASSED, "", walls)
    for line in lines:
        if line.startswith(RAISED):
            return ProgramOutcome(Ending.FAILED, line.removeprefix(RAISED).decode(errors="replace"), walls)
    if watched.stopped is not None:
        return ProgramOutcome(watched.stopped, "", walls)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ProgramOutcome(Ending.DIED, f"ended without a verdict ({how})", walls)
