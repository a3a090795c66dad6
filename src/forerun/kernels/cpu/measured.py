"""What was measured on this machine, kept on disk, so that a choice costs its timing once.

One JSON file for a machine and the versions that matter: other hardware, another torch or a new Forerun measure anew.
A file that cannot be read or written is no reason to fail: then the timing is repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch

from forerun.config import cache_folder
from forerun.errors import ForerunError
from forerun.files import parse_json, write_whole
from forerun.version import __version__

_known: dict[str, Any] = {}


def remembered(key: str, measure: Callable[[], Any]) -> Any:
    """The answer to `key` from this process, from disk, or from `measure()`; answers are JSON values."""
    if not _known:
        _known.update(_read())
    if key not in _known:
        _known[key] = measure()
        _write(_known)
    return _known[key]


def known() -> dict[str, Any]:
    """All answers so far, of this process and on disk; nothing is measured."""
    return {**_read(), **_known}


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


def path() -> Path:
    """The file for this machine."""
    threads = f"{torch.get_num_threads()} threads"
    name = hashlib.sha256(json.dumps([machine(), threads], sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "cpu" / f"{name}.json"


def _read() -> dict[str, Any]:
    try:
        stored = parse_json(path().read_text(encoding="utf-8"))["measured"]
        return dict(stored)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(known: dict[str, Any]) -> None:
    """Beside, then renamed; what another process has added meanwhile stays."""
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "measured": {**_read(), **known}}
        text = json.dumps(content, indent=1, sort_keys=True)
        write_whole(path(), lambda beside: beside.write_text(text, encoding="utf-8"))
    except (OSError, ForerunError):
        return


def forget() -> None:
    """Drop what this process knows, for tests and after the number of threads has changed."""
    _known.clear()
