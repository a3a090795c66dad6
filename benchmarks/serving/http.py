"""The server over an engine that is warm already, HTTP and its client in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from forerun.bench.serve.load import LoadLevel, ServerLoad
from forerun.bench.serve.samples import Counts, RequestSample
from forerun.decoder import SpeculativeDecoder
from forerun.errors import ServerError
from forerun.measure.record import Record, load
from forerun.serve.apart.host import EngineHost, make_host
from forerun.serve.apart.process import FrontProcess
from forerun.serve.apart.wire import StartMessage
from forerun.serve.model import ServedModel
from forerun.serve.settings import AddressSettings, ServiceSettings

PATIENCE = 60.0  # seconds for it to begin, and to end


class Servers:
    """One at a time over the same engine, which is the decoder's own again once it is stopped. The process of the next
    one is started early: what it imports takes seconds."""

    def __init__(self, max_rows: int) -> None:
        self._settings = ServiceSettings(max_rows=max_rows, max_queued=4096)
        self._next = FrontProcess()
        self._front: FrontProcess | None = None
        self._host: EngineHost | None = None

    def url(self, decoder: SpeculativeDecoder, model: ServedModel) -> str:
        """The address of the one that runs; if there is none, of a new one."""
        if self._host is None:
            self._front, self._next = self._next, FrontProcess()
            self._host = make_host(decoder, model, self._front.connection)
            ready, urls = threading.Event(), list[str]()

            def on_ready(url: str) -> None:
                urls.append(url)
                ready.set()

            address = AddressSettings(port=0, log_level="error")
            start = StartMessage(model, self._settings, address, is_split=False)
            self._thread = threading.Thread(target=self._host.run, args=(start, on_ready), name="host", daemon=True)
            self._thread.start()
            if not ready.wait(PATIENCE):
                raise ServerError("the server did not start")
            self._url = urls[0]
        return self._url

    def stop(self) -> None:
        if self._host is not None and self._front is not None:
            self._host.drain()
            self._thread.join(PATIENCE)
            self._front.close()
            self._front = self._host = None

    def close(self) -> None:
        self.stop()
        self._next.close()


def ask(url: str, options: Sequence[str], output: Path) -> Record:
    """What `forerun bench serve` says of it."""
    command = [sys.executable, "-m", "forerun", "bench", "serve", *options, "--output", str(output), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"forerun bench serve failed: {done.stderr.strip()[-500:]}")
    return load(output, "serve")


def levels_of(record: Record, loads: Sequence[ServerLoad]) -> list[LoadLevel]:
    """From what is stored."""
    levels: dict[tuple[str, str | None], LoadLevel] = {}
    for row in record.rows:
        key = row["load"], row["speculation"]
        if key not in levels:
            (asked,) = (each for each in loads if each.name == row["load"])
            levels[key] = level = LoadLevel(asked, row["speculation"], [])
            level.seconds = record.details["seconds"][level.name]
        counts = None if row["counts"] is None else Counts(**row["counts"])
        levels[key].samples.append(
            RequestSample(
                row["arrived"], row["ttft"], row["e2e"], row["prompt_tokens"], row["tokens"], counts=counts,
                error=row["error"],
            )
        )  # fmt: skip
    return list(levels.values())
