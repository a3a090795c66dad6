"""Kernels are compiled before anything is timed, by several processes: one after the other takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MOST_PROCESSES = 16
CODE = "from {module} import {name}; {name}({part}, {parts}, {arguments})"


def compile_apart(module: str, name: str, *arguments: object) -> None:
    """Calls `module.name(part, parts, *arguments)` in processes that leave what they compile in Triton's cache.

    Arguments must read as Python what `repr` writes. Where a process fails, its kernels are compiled when first used.
    """
    parts = max(1, min(MOST_PROCESSES, os.cpu_count() or 1))
    root = Path(__file__).parents[1]
    places = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    written = ", ".join(map(repr, arguments))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CODE.format(module=module, name=name, part=part, parts=parts, arguments=written)],
            env=environment,
        )
        for part in range(parts)
    ]
    for process in started:
        process.wait()
