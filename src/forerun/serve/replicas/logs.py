"""How much Ray says, and what its workers say: Ray keeps it in files, and a process of its own that looks into them ten
times a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.serve.settings import AddressSettings

SECONDS = 1.0  # between two looks
FILES = ("worker-*.err", "worker-*.out")
ACTOR = ":actor_name:"  # what follows in such a line is who writes from there on
MARKS = (ACTOR, ":job_id:", ":task_name:")  # lines that Ray writes for its own reader


def log_level(address: AddressSettings) -> str:
    """What Ray calls information is for those who look for a fault."""
    return "WARNING" if address.log_level == "info" else address.log_level.upper()


def logging_config(address: AddressSettings) -> dict[str, Any]:
    return {"log_level": log_level(address), "enable_access_log": address.log_level == "debug"}


@dataclass(slots=True)
class _File:
    read: int = 0  # bytes
    writer: str = ""


class WorkerLogs:
    """The files of a folder, read on from where they ended; half a line waits for its other half."""

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._folder, self._show = folder, show
        self._files: dict[Path, _File] = {}

    def look(self) -> None:
        for pattern in FILES:
            for path in sorted(self._folder.glob(pattern)):
                with suppress(FileNotFoundError):  # renamed meanwhile, to begin anew
                    self._read_on(path, self._files.setdefault(path, _File()))

    def _read_on(self, path: Path, file: _File) -> None:
        size = path.stat().st_size
        if size < file.read:  # a new file in the place of a full one
            file.read = 0
        if size == file.read:
            return
        with path.open("rb") as stream:
            stream.seek(file.read)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        file.read += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            if line.startswith(ACTOR):
                file.writer = line.removeprefix(ACTOR)
            elif not line.startswith(MARKS):
                self._show(f"({file.writer or 'worker'} pid={path.stem.rpartition('-')[2]}) {line}")


@contextmanager
def shown_logs(folder: Path) -> Iterator[None]:
    """On standard error, as it comes, and what is left at the end."""
    logs, has_ended = WorkerLogs(folder, _show), threading.Event()

    def work() -> None:
        while not has_ended.wait(SECONDS):
            logs.look()

    thread = threading.Thread(target=work, name="forerun-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        logs.look()


def _show(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
