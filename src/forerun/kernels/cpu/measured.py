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


def seconds(candidates: Mapping[str, Callable[[], object]], repeats: int = 4) -> dict[str, float]:
    """The best time of each, taken in turns so that a busy moment hits all, after a first call that may compile."""
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(repeats + 1):
        for name, work in candidates.items():
            started = time.perf_counter()
            work()
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


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
remembered, known, forget, path = _answers.get, _answers.known, _answers.forget, _answers.path
