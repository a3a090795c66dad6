"""Level by level, storing after each: the whole of `forerun bench serve`."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forerun.bench.prompts import Questions, find_questions
from forerun.bench.serve.bodies import RequestBodies
from forerun.bench.serve.counters import read_counters
from forerun.bench.serve.load import LoadLevel, ServerLoad, run_level
from forerun.bench.serve.process import served
from forerun.bench.serve.report import make_record
from forerun.bench.serve.results import ServeResults
from forerun.bench.serve.samples import RequestSample, send
from forerun.bench.settings import ServeSettings
from forerun.client import ApiClient, is_address
from forerun.errors import ServerError
from forerun.files import allow_many_open_files
from forerun.measure.progress import Reporter
from forerun.measure.provenance import Provenance, provenance
from forerun.measure.record import Record
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

CONCURRENCY = (1, 8)
"""Where no load is asked for."""
WARM_UP_TOKENS = 8
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(
    settings: ServeSettings,
    target: Sequence[str],
    output: Path,
    reporter: Reporter,
    *,
    model: str | None = None,
    api_key: str | None = None,
    data: Path | None = None,
) -> Record:
    """`target` is the address of a server, or what `forerun serve` is to be given for one of our own."""
    allow_many_open_files()
    questions = find_questions(data)
    is_url = bool(target) and is_address(target[0])
    command = public_command(["forerun", *sys.argv[1:]], target[0] if is_url else None)
    origin = provenance("cpu", command)
    if not is_url:
        reporter.start("starting forerun serve")
    with nullcontext(target[0]) if is_url else served(target, partial(_say_starting, reporter)) as url:
        bench = ServeBench(settings, ApiClient(url, api_key), questions, origin, reporter, model)

        def save(outcome: TurnsOutcome) -> Record:
            bench.results.notes = (*bench.notes, *outcome.problems)
            record = make_record(bench.results, outcome.complete)
            if bench.results.measured:
                record.save(output)
            return record

        return take_turns(bench.turns(), reporter, save, tolerant=True)


class ServeBench:
    """One server and its levels of load."""

    def __init__(
        self,
        settings: ServeSettings,
        client: ApiClient,
        questions: Questions,
        origin: Provenance,
        reporter: Reporter,
        model: str | None = None,
    ) -> None:
        self.settings, self.client, self.reporter = settings, client, reporter
        card = asyncio.run(self._meet(model))
        self.bodies = RequestBodies(settings, questions.items, card["id"])
        self.notes = () if settings.prompt_length or questions.note is None else (questions.note.rstrip("."),)
        shortest = f"{settings.shortest_prompt} to " if settings.shortest_prompt is not None else ""
        ids = f"{shortest}{settings.prompt_length} random ids a prompt"
        shown = asdict(settings) | {
            "rates": [str(rate) for rate in settings.rates],  # JSON has no infinity
            "model": card["id"],
            "server": _shown_address(client.url),
            "served_by": card.get("owned_by"),
            "drafter": card.get("drafter"),
            "prompts": ids if settings.prompt_length else questions.source,
        }
        self.results = ServeResults(origin, shown, settings.limits)
        asyncio.run(self._warm_up())

    def turns(self) -> Iterator[Turn]:
        """Those with and without drafts alternate, so that a machine that slows down slows both."""
        settings = self.settings
        counts = settings.concurrency if settings.concurrency is not None else () if settings.rates else CONCURRENCY
        loads = [ServerLoad(concurrency=count, ramp=settings.ramp) for count in counts]
        loads += [ServerLoad(rate=rate) for rate in settings.rates]
        for load in loads:
            for mode in settings.speculation or (None,):
                level = LoadLevel(load, mode, [])
                yield Turn(level.name, partial(self.measure, level))

    def measure(self, level: LoadLevel) -> None:
        """Interrupted, the level keeps what was answered."""
        self.results.levels.append(level)
        asyncio.run(self._measure(level))

    async def _measure(self, level: LoadLevel) -> None:
        settings = self.settings
        before = await read_counters(self.client)
        done = itertools.count(1)

        async def send_one(number: int, sample: RequestSample) -> None:
            await send(self.client, settings.endpoint, self.bodies.body(number, level.speculation), sample)
            self.reporter.start(f"{level.name}: {next(done)} of at most {settings.requests} requests")

        try:
            rng = random.Random(settings.seed)
            await run_level(level, send_one, settings.requests, settings.seconds, rng)
            after = await read_counters(self.client)
        finally:
            self.client.close()  # its connections belong to this event loop
        if before is not None and after is not None:
            self.results.counters[level.name] = after.since(before)

    async def _meet(self, model: str | None) -> dict[str, Any]:
        try:
            return await self.client.model(model)
        finally:
            self.client.close()

    async def _warm_up(self) -> None:
        """One request of each kind, which also finds out whether the server takes what it will be asked."""
        try:
            for mode in self.settings.speculation or (None,):
                sample = RequestSample(0.0)
                body = self.bodies.body(0, mode) | {"max_tokens": min(WARM_UP_TOKENS, self.settings.max_new_tokens)}
                await send(self.client, self.settings.endpoint, body, sample)
                if sample.error is not None:
                    raise ServerError(sample.error)
        finally:
            self.client.close()


def _say_starting(reporter: Reporter, line: str) -> None:
    reporter.start(f"starting forerun serve: {line}")


def public_command(command: Sequence[str], address: str | None = None) -> list[str]:
    """Without the key, and without the names of others' machines: that of the server, at `address`, and every URL.

    Other words with a colon and a number are what was asked for, such as `--goodput ttft:500`.
    """
    shown: list[str] = []
    for word in command:
        if shown and shown[-1] == "--api-key":
            shown.append("KEY")
        elif word.startswith("--api-key="):
            shown.append("--api-key=KEY")
        else:
            shown.append(_shown_address(word) if word == address or "://" in word else word)
    return shown


def _shown_address(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return url if parts.hostname in LOOPBACK else "a server elsewhere"
