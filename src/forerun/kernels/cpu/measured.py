"""What was measured on this machine's processor, and how: `kernels.remembered` keeps it on disk."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch

from forerun.kernels.remembered import Remembered
from forerun.version import __version__

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PATIENCE = 0.4  # seconds to wait for calls that nobody disturbs
# Preemptions a second: the system's own threads took two busy cores 20 to 50 times on quiet machines, one other program
# 100 to 230 times.
OF_THE_SYSTEM = 70


def remembered(key: str, measure: Callable[[], Any]) -> Any:
    """The answer to `key` from this process, from disk, or from `measure()`; answers are JSON values.

    Products of several threads wait for each other: where another program has the cores, timings are a scheduler's
    turns and say nothing. An answer from such a moment is not kept on disk.
    """
    before = disturbances()
    return _answers.get(key, measure, lambda: disturbances() == before)


def disturbances() -> int:
    """Measurements of this process so far in which some candidate was never timed without a disturbance."""
    return _disturbed.number


def count_disturbance() -> None:
    """A measurement whose numbers cannot be a quiet machine's."""
    _disturbed.number += 1


def seconds(candidates: Mapping[str, Callable[[], object]], repeats: int = 4) -> dict[str, float]:
    """The best time of each, taken in turns so that a busy moment hits all, after a first call that may compile.

    Calls during which the scheduler gave a core of this process to another program count only where there are no
    others. It goes on for a while until there were enough.
    """
    for work in candidates.values():
        work()
    undisturbed: dict[str, list[float]] = {name: [] for name in candidates}
    disturbed: dict[str, list[float]] = {name: [] for name in candidates}
    began, turn = time.perf_counter(), 0
    while turn < repeats or (_fewest(undisturbed) < repeats and time.perf_counter() - began < PATIENCE):
        turn += 1
        for name, work in candidates.items():
            before, started = _preemptions(), time.perf_counter()
            work()
            taken = time.perf_counter() - started
            is_quiet = _preemptions() - before <= OF_THE_SYSTEM * taken
            (undisturbed if is_quiet else disturbed)[name].append(taken)
    if not _fewest(undisturbed):
        count_disturbance()
    return {name: min(undisturbed[name] or disturbed[name]) for name in candidates}


def _fewest(times: Mapping[str, list[float]]) -> int:
    return min(map(len, times.values()))


class _Disturbed:
    number = 0


_disturbed = _Disturbed()


def _preemptions() -> int:
    """How often a thread of this process was made to give its core to another program; 0 where nobody counts."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@cache
def machine() -> dict[str, Any]:
    """What a measurement depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "torch": torch.__version__,
        "numba": numba.__version__,
        "forerun": __version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for name in ("model name", "CPU part"):
            for line in info.read_text(errors="replace").splitlines():
                if line.startswith(name):
                    return f"{platform.machine()} {line.split(':', 1)[1].strip()}"
    return f"{platform.machine()} {platform.processor()}"


_answers = Remembered("cpu", machine, lambda: f"{torch.get_num_threads()} threads")
known, forget, path = _answers.known, _answers.forget, _answers.path
