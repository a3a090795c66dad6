"""Where `make judges` has put the clients that others wrote, and how they are run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2] / "build" / "judges"


def program(judge: str, name: str) -> str:
    """A command of a judge's environment; the test is skipped where there is none."""
    found = ROOT / judge / "bin" / name
    if not found.exists():
        pytest.skip(f"{judge} is not installed: make judges")
    return str(found)


def run(command: Sequence[str | Path], *, timeout: float = 900, folder: Path | None = None, **environment: str) -> str:
    """What it prints; a failure shows all of it."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False, cwd=folder,
        env={**os.environ, **offline, **environment},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-6000:]
    return told
