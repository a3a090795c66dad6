"""Processes that a test has started, and theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children, and children of those; on Linux."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    """Not one that has ended and that nobody has asked about yet; on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(is_so: Callable[[], bool], seconds: float) -> None:
    """Fails where it takes longer."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(0.1)
