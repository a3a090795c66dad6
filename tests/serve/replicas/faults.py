"""A replica whose engine can be brought to a halt from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from forerun.cli.replicas import maker
from forerun.serve.settings import ServiceSettings

LONGEST_ROUND = 2.0  # seconds, of the engine that is brought to a halt; others are given what they have in use


def make(options: dict[str, Any], limits: ServiceSettings, halt: str, engine: str) -> Any:
    """As `maker` does; the first replica that finds a file at `halt` takes it away, and its engine is stopped."""
    service = maker(options, limits)(engine)
    threading.Thread(target=_watch, args=(service, Path(halt)), daemon=True).start()
    return service


def _watch(service: Any, halt: Path) -> None:
    while True:
        time.sleep(0.1)
        try:
            halt.unlink()
        except FileNotFoundError:
            continue
        service.longest_round = LONGEST_ROUND
        for children in Path("/proc/self/task").glob("*/children"):  # of each thread of this process
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGSTOP)
        return
