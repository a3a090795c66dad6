"""`forerun serve` in a process of its own, which signals can be sent to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.folders import VOCAB, save
from support.tiny import tiny_model


@contextmanager
def served(model: Path | str, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and the line that names it; a folder is given a small model where there is none."""
    if isinstance(model, Path) and not model.exists():
        save(model, tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    place = ("--device", "cpu", "--port", str(port), "--log-level", "error")
    command = [sys.executable, "-m", "forerun", "serve", str(model), *place, *options]
    environment = {**os.environ, "FORERUN_KERNELS": "off", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    with spawned(command, environment) as server:
        yield server


@contextmanager
def spawned(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The same of any command that serves, once it is ready."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("Serving "))
        yield process, line.split(" at ")[1].split(": ")[0], line
    finally:
        process.kill()
        process.wait()
