"""A `llama-server` in a process of its own, one a way to speculate, asked over HTTP for whole texts."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forerun.bench.methods import Prompts, Run
from forerun.client import ApiClient
from forerun.errors import ForerunError, ServerError
from forerun.measure.memory import peak_bytes
from forerun.processes import bound_program, end, free_port

PLAIN = "none"
COPIES = "ngram"
DRAFTS = "draft-simple"
READY_SECONDS = 120.0
LAST_LINES = 3
END_SECONDS = 2.0  # then it is killed: whoever interrupts a comparison has no patience
BLOCK = 256  # llama.cpp rounds a row's context up to it


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What all servers of a comparison share."""

    program: Path
    model: Path
    rows: int  # decoded together, at most
    context: int  # tokens of a row, at most
    threads: int
    on_gpu: bool
    draft: Path | None = None

    def command(self, mode: str, port: int) -> list[str]:
        row = -(-self.context // BLOCK) * BLOCK
        words: list[object] = [
            self.program, "--model", self.model, "--host", "127.0.0.1", "--port", port, "--parallel", self.rows,
            "--ctx-size", row * self.rows, "--threads", self.threads, "--threads-batch", self.threads,
        ]  # fmt: skip
        if not self.on_gpu:
            words += ["--n-gpu-layers", 0]
        if mode != PLAIN:
            words += ["--spec-type", mode]
        if mode == DRAFTS:
            words += ["--model-draft", self.draft]
        return list(map(str, words))


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """One that answers."""

    url: str
    process: subprocess.Popen[bytes]

    def complete(self, prompts: Prompts, max_new_tokens: int, temperature: float, seed: int) -> list[dict[str, Any]]:
        """All prompts at once; each answer has `max_new_tokens` tokens, drawn from the law as it is."""
        asked = {
            "n_predict": max_new_tokens, "temperature": temperature, "seed": seed, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        }  # fmt: skip

        async def ask_all() -> list[dict[str, Any]]:
            with closing(ApiClient(self.url)) as client:
                calls = [client.post("/completion", {**asked, "prompt": list(prompt)}) for prompt in prompts]
                return list(await asyncio.gather(*calls))

        return asyncio.run(ask_all())


class WithLlamaServer:
    """A method whose texts a server writes."""

    target = None  # its numbers are rounded in other places than ours: no text of ours is its

    def __init__(self, name: str, title: str, server: LlamaServer, temperature: float, seed: int) -> None:
        self.name, self.title, self.server = name, title, server
        self.temperature, self.seed = temperature, seed

    def refusal(self, batch: int) -> str | None:
        return None

    def run(self, prompts: Prompts, max_new_tokens: int) -> Run:
        started = time.perf_counter()
        answers = self.server.complete(prompts, max_new_tokens, self.temperature, self.seed)
        seconds = time.perf_counter() - started
        tokens = tuple(tuple(answer["tokens"]) for answer in answers)
        if (short := min(map(len, tokens))) < max_new_tokens:
            raise ServerError(
                f"llama-server wrote {short} tokens instead of {max_new_tokens}; is its context too short?"
            )
        times = [answer["timings"] for answer in answers]
        drafted, accepted = (sum(each.get(key, 0) for each in times) for key in ("draft_n", "draft_n_accepted"))
        return Run(
            tokens, seconds, rounds=sum(map(len, tokens)) - accepted,  # a pass gives what it accepts and one token
            drafted=drafted or None, accepted=accepted if drafted else None,
        )  # fmt: skip

    def memory(self) -> int | None:
        return peak_bytes(self.server.process.pid)


def modes_of(program: Path) -> tuple[str, ...]:
    """How a server can speculate, by its own help."""
    try:
        help_text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ForerunError(
            f"{str(program)!r} does not run ({error}); is it a llama-server for this machine?"
        ) from error
    match = re.search(r"--spec-type\s+([\w,|\-]+)", help_text)
    return tuple(re.split(r"[,|]", match[1])) if match else ()


@contextmanager
def started(settings: ServerSettings, mode: str = PLAIN) -> Iterator[LlamaServer]:
    """A server that has loaded its model; its process ends with the block, or with ours."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryFile() as told:
        command = bound_program(signal.SIGKILL, settings.command(mode, port))
        process = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            server = LlamaServer(f"http://127.0.0.1:{port}", process)
            _wait_until_ready(server, lambda: _last_lines(told))
            yield server
        finally:
            end(process, END_SECONDS)


def _wait_until_ready(server: LlamaServer, last_lines: Callable[[], str]) -> None:
    async def is_ready() -> bool:
        with closing(ApiClient(server.url)) as client:
            try:
                return bool(await client.get("/health"))
            except ServerError:
                return False

    end = time.monotonic() + READY_SECONDS
    while not asyncio.run(is_ready()):
        if server.process.poll() is not None:
            raise ServerError(f"llama-server ended with status {server.process.returncode}: {last_lines()}")
        if time.monotonic() > end:
            raise ServerError(f"llama-server was not ready within {READY_SECONDS:.0f} seconds: {last_lines()}")
        time.sleep(0.1)


def _last_lines(told: IO[bytes]) -> str:
    told.seek(0)
    lines = told.read().decode("utf-8", "replace").splitlines()
    return " ".join(line.strip() for line in lines[-LAST_LINES:])
