"""Mixed traffic for as long as one likes: clients that stay, leave, ask badly, ask too much. Nothing may be left over.

`python tests/serve/soak.py SECONDS` runs it; the slow part of the suite does so for a short while.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.cache.paged import PagedCache
from forerun.client import ApiClient
from forerun.errors import ServerError
from serve.serving import Server, make_decoder, running

CLIENTS = 12
ROWS = 8
CACHE_TOKENS = 4096
DEADLINE = 4.0  # seconds of a request at this server
LONGEST_WAIT = 60.0
COMPLETIONS = "/v1/completions"
WORDS = ("the sea ", "one two ", "Größe ", "日本 ", '{"a": ')
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
GROWTH = 48 * 2**20
"""Bytes of memory that allocators may keep from load to load; a leak of one row's keys a second would be more."""


@dataclass(frozen=True, slots=True)
class Held:
    """What an idle server holds."""

    rows: int
    blocks: int
    threads: tuple[str, ...]  # by name
    descriptors: int
    memory: int  # bytes


@dataclass(slots=True)
class Soak:
    """How requests ended, and what was held after a quarter of the time and in the end."""

    ends: Counter[str]
    before: Held
    after: Held

    def check(self) -> None:
        unknown = {name for name in self.ends if name.startswith("lost")}
        assert not unknown, self.ends
        for name in ("rows", "blocks", "descriptors"):
            assert getattr(self.after, name) <= getattr(self.before, name), (name, self.before, self.after)
        assert len(self.after.threads) <= len(self.before.threads), (self.before.threads, self.after.threads)
        assert self.after.rows == 0 and self.after.memory - self.before.memory < GROWTH, (self.before, self.after)


def soak(seconds: float, seed: int = 0) -> Soak:
    """On a server of its own."""
    decoder = make_decoder(kernels="off")
    # In blocks, as on a GPU, so that a block that is not given back is seen.
    decoder.engine.target.cache = PagedCache(CACHE_TOKENS, torch.device("cpu"), longest=2048, block_size=16)
    with running(decoder, max_rows=ROWS, max_queued=32, timeout=DEADLINE) as server:
        ends: Counter[str] = Counter()
        asyncio.run(_traffic(server, seconds / 4, seed, Counter()))
        before = _held(server)
        asyncio.run(_traffic(server, 3 * seconds / 4, seed + 1, ends))
        return Soak(ends, before, _held(server))


async def _traffic(server: Server, seconds: float, seed: int, ends: Counter[str]) -> None:
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng, api = random.Random(f"{seed} {number}"), ApiClient(server.url)
        while time.monotonic() < until:
            name, act = rng.choice(ACTS)
            try:
                async with asyncio.timeout(LONGEST_WAIT):
                    ends[f"{name}: {await act(api, rng)}"] += 1
            except TimeoutError:
                ends[f"lost: {name} was never answered"] += 1
            except ServerError as error:
                kind = "answered" if error.status in ALLOWED[name] else "lost"
                ends[f"{kind}: {name} with {error.status} {error}"[:100]] += 1
        api.close()

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(number))


async def _whole(api: ApiClient, rng: random.Random) -> str:
    body = _body(rng, n=rng.choice((1, 1, 3)), logprobs=rng.choice((None, 2)), echo=rng.random() < 0.2)
    answer = await api.post(COMPLETIONS, body)
    assert len(answer["choices"]) == body["n"] and all(choice["finish_reason"] for choice in answer["choices"])
    return "whole"


async def _streamed(api: ApiClient, rng: random.Random) -> str:
    ends = [
        choice["finish_reason"]
        async for event in api.events(COMPLETIONS, _body(rng))
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert len(ends) == 1, "every stream ends once"
    return "whole"


async def _leave(api: ApiClient, rng: random.Random) -> str:
    chunks = rng.randint(1, 4)
    async with aclosing(api.events(COMPLETIONS, _body(rng, max_tokens=400))) as events:
        async for _ in events:
            chunks -= 1
            if not chunks:
                return "left"
    return "ended first"


async def _abort(api: ApiClient, rng: random.Random) -> str:
    """While waiting for a whole answer."""
    try:
        async with asyncio.timeout(rng.uniform(0.0, 0.2)):
            await api.post(COMPLETIONS, _body(rng, max_tokens=400))
    except TimeoutError:
        return "left"
    return "ended first"


async def _too_long(api: ApiClient, rng: random.Random) -> str:
    await api.post(COMPLETIONS, _body(rng, prompt="x" * 700, max_tokens=1300))
    return "whole"


async def _bad(api: ApiClient, rng: random.Random) -> str:
    changes = ({"n": 0}, {"prompt": []}, {"nobody": 1}, {"stop": [3]}, {"prompt": "x" * 5000}, {"temperature": "hot"})
    await api.post(COMPLETIONS, _body(rng, **rng.choice(changes)))
    return "lost: a bad body was answered"


async def _schema(api: ApiClient, rng: random.Random) -> str:
    answer = await api.post(COMPLETIONS, _body(rng, guided_json=SCHEMA, ignore_eos=None, max_tokens=60))
    return "whole" if answer["choices"] else "lost: no text"


def _body(rng: random.Random, **more: Any) -> dict[str, Any]:
    return {
        "prompt": rng.choice(WORDS) * rng.randint(1, 8),
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice((0, 0.8)),
        "seed": rng.randrange(1000),
        "ignore_eos": True,
        "n": 1,
        "speculation": rng.choice((None, {"enabled": False}, {"origins": True, "max_draft_tokens": 2})),
        **more,
    }


Act = Callable[[ApiClient, random.Random], Awaitable[str]]
ACTS: tuple[tuple[str, Act], ...] = (
    ("whole", _whole), ("streamed", _streamed), ("leave", _leave), ("abort", _abort), ("too long", _too_long),
    ("bad", _bad), ("schema", _schema),
)  # fmt: skip
BUSY = (408, 503)
ALLOWED: dict[str, tuple[int | None, ...]] = {
    name: (*BUSY, None) if name in ("streamed", "leave") else BUSY for name, _ in ACTS
} | {"bad": (400,)}
"""Statuses each may meet under load; a stream that has begun tells an error without one."""


def _held(server: Server) -> Held:
    assert server.is_idle(), "nobody decodes or waits once all have left"
    server.client.close()
    time.sleep(0.5)  # connections that were closed on one side
    gc.collect()
    cache = server.decoder.engine.target.cache
    assert isinstance(cache, PagedCache)
    cache.check()
    return Held(
        rows=len(cache.rows),
        blocks=cache.num_used,
        threads=tuple(sorted(thread.name for thread in threading.enumerate() if _is_ours(thread))),
        descriptors=len(os.listdir("/proc/self/fd")),
        memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _is_ours(thread: threading.Thread) -> bool:
    """The pools of the event loop and of the engine's helpers grow to a bound, and one more of theirs is no leak; nor
    is one that `threading` has not started and only met (those of a test runner, of libraries), which it never forgets.
    """
    is_met = isinstance(thread, threading._DummyThread)
    return not is_met and not thread.name.startswith(("asyncio_", "forerun-helper"))


if __name__ == "__main__":
    done = soak(float(sys.argv[1]))
    for name, number in sorted(done.ends.items()):
        sys.stdout.write(f"{number:7d}  {name}\n")
    sys.stdout.write(f"before {done.before}\nafter  {done.after}\n")
    done.check()
