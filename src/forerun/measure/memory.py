"""The most memory that a process has held, by what Linux tells of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from forerun.errors import ForerunError

PEAK = re.compile(r"VmHWM:\s*(\d+) kB")
STATUS = "\nimport pathlib, sys\nsys.stdout.write(pathlib.Path('/proc/self/status').read_text())\n"


def peak_bytes(pid: int) -> int | None:
    """Of a process that runs; None where the system has no such file."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = PEAK.search(status)
    return int(match[1]) * 1024 if match else None


def peak_of_script(script: str, *words: str) -> int | None:
    """Of a Python process that runs `script`, told by itself at its end; None where the system does not say.

    What the system tells the parent of a child (`ru_maxrss`) would count the pages of the parent as it was forked.
    """
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-c", script + STATUS, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForerunError(f"a process to measure memory ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    match = PEAK.search(done.stdout)
    return int(match[1]) * 1024 if match else None
