"""The server in a thread of this process, over an engine that is warm already, and its client in another process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forerun.bench.serve.load import Level, Load
from forerun.bench.serve.samples import Counts, Sample
from forerun.errors import ServerError
from forerun.measure.record import Record, load
from forerun.serve.model import ServedModel
from forerun.serve.run import make_server
from forerun.serve.service import Service
from forerun.serve.settings import AddressSettings, ServiceSettings

PATIENCE = 60.0  # seconds for it to begin, and to end


@contextmanager
def served(model: ServedModel, max_rows: int) -> Iterator[str]:
    """Its address. The engine is the model's own again once the block has ended."""
    service = Service(model, ServiceSettings(max_rows=max_rows, max_queued=4096))
    ready, urls = threading.Event(), list[str]()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = make_server(service, AddressSettings(port=0, log_level="error"), on_ready)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        if not ready.wait(PATIENCE):
            raise ServerError("the server did not start")
        yield urls[0]
    finally:
        server.end()
        thread.join(PATIENCE)
        service.close(drain=False)


def ask(url: str, options: Sequence[str], output: Path) -> Record:
    """What `forerun bench serve` says of it."""
    command = [sys.executable, "-m", "forerun", "bench", "serve", *options, "--output", str(output), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"forerun bench serve failed: {done.stderr.strip()[-500:]}")
    return load(output, "serve")


def levels_of(record: Record, loads: Sequence[Load]) -> list[Level]:
    """From what is stored."""
    levels: dict[tuple[str, str | None], Level] = {}
    for row in record.rows:
        key = row["load"], row["speculation"]
        if key not in levels:
            (asked,) = (each for each in loads if each.name == row["load"])
            levels[key] = level = Level(asked, row["speculation"], [])
            level.seconds = record.details["seconds"][level.name]
        counts = None if row["counts"] is None else Counts(**row["counts"])
        levels[key].samples.append(
            Sample(
                row["arrived"], row["ttft"], row["e2e"], row["prompt_tokens"], row["tokens"], counts=counts,
                error=row["error"],
            )
        )  # fmt: skip
    return list(levels.values())
