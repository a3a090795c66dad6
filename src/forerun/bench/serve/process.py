"""`forerun serve` in a process of its own, for a measurement without a server."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from forerun.errors import ServerError
from forerun.processes import bound_command, end

ADDRESS = re.compile(r"^Serving .* at (https?://\S+?): ")
LAST_LINES = 5
PATIENCE = 30.0  # seconds for it to end


@contextmanager
def served(arguments: Sequence[str], tell: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Its address; the process ends with the block, and with this process however that ends. Ctrl-C is ours alone: it
    must answer until we have left.

    `tell` is given what it says until it is ready: on a new machine it compiles for minutes.
    """
    options = ["serve", *arguments, "--port", "0", "--log-level", "error"]
    command = bound_command(signal.SIGTERM, "forerun", options)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield _address(process, tell)
    finally:
        end(process, PATIENCE)


def _address(process: subprocess.Popen[str], tell: Callable[[str], None]) -> str:
    """From the line that says it is ready; the rest of what it says is read, so that it never waits for a reader."""
    assert process.stderr is not None
    told: list[str] = []
    for line in process.stderr:
        if match := ADDRESS.match(line):
            _drain(process)
            return match[1]
        told.append(line.strip())
        tell(told[-1])
    raise ServerError(f"the server did not start: {' '.join(told[-LAST_LINES:])}")


def _drain(process: subprocess.Popen[str]) -> None:
    import threading

    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()
