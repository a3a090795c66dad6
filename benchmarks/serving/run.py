"""Carrying out the measurement: every load over HTTP and by the engine alone, in turns."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.serving.bare import BareLoad
from benchmarks.serving.http import Servers, ask, levels_of
from benchmarks.serving.report import BARE, HTTP, Measurement, make_record, summarize
from benchmarks.serving.tokens import made_up_tokenizer
from forerun.bench.decode.pair import default_pair, open_pair
from forerun.bench.serve.bodies import RequestBodies
from forerun.bench.serve.load import LoadLevel, ServerLoad
from forerun.bench.settings import ServeSettings
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.engine import Request
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from forerun.serve.model import ServedModel
from forerun.serve.schemas import CompletionBody
from forerun.serve.translate import completion_requests

NAME = "pair"
MODES = ("on", "off")
MORE = 2  # times as many requests as the server has answered in the same time


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = None  # None: what suits the device
    draft: str | None = None
    streams: tuple[int, ...] = (8, 64, 1, 128, 32)
    bare: tuple[int, ...] = (8, 64)  # of these, and of all rates, the engine alone as well
    stream_seconds: float = 4.0
    ramp: float = 0.75  # seconds over which streams begin: about as long as a request of one in 64 takes
    prompt: int = 128
    output: int = 128
    rates: tuple[float, ...] = (8.0, 32.0)
    rate_seconds: float = 10.0
    rate_prompt: tuple[int, int] = (32, 512)
    rate_output: tuple[int, int] = (32, 256)
    requests: int = 4096
    max_rows: int = 128
    max_draft: int = 8
    cache_tokens: int | None = None  # None: by the device
    seconds: float | None = None  # begin nothing later than that


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    servers = Servers(asked.max_rows)
    try:
        return _run(asked, device, output, reporter, command, servers)
    finally:
        servers.close()


def _run(
    asked: Settings,
    device: torch.device,
    output: Path,
    reporter: Reporter,
    command: Sequence[str],
    servers: Servers,
) -> Record:
    reporter.start("building the pair")
    started = perf_counter()
    pair = open_pair(asked.model or default_pair(device), asked.draft, device, None, 0)
    tokenizer = pair.tokenizer or made_up_tokenizer(pair.target.config.vocab_size)
    decoder = SpeculativeDecoder(
        pair.target, DraftModel(pair.draft), tokenizer=tokenizer, cache_tokens=asked.cache_tokens
    )
    reporter.start("warming up")
    context = max(asked.prompt + asked.output, asked.rate_prompt[1] + asked.rate_output[1])
    warmed = decoder.engine.warm_up(asked.max_rows, asked.max_draft, context)
    reporter.say(f"built and warmed up after {perf_counter() - started:.1f} s")
    model = ServedModel.of(decoder, tokenizer, NAME, created=0, drafter_name="draft model")
    measured: list[Measurement] = []
    sent: dict[str, list[float]] = {}  # when clients' requests were, by the level's name

    def keep(one: Measurement) -> None:
        measured.append(one)
        first, token = 1e3 * one.first_median, 1e3 * one.token_median
        reporter.say(f"{one.name}, {one.by}: {first:.1f} ms, {token:.2f} ms, {one.tokens_per_second:.0f} tokens/s")

    def over_http(settings: ServeSettings, loads: Sequence[ServerLoad], modes: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            url = servers.url(decoder, model)
            record = ask(url, _options(settings, loads, modes), Path(folder) / "client.json")
        for level in levels_of(record, loads):
            sent[level.name] = [sample.arrived for sample in level.samples]
            keep(summarize(HTTP, level))

    def bare(settings: ServeSettings, load: ServerLoad, mode: str) -> None:
        servers.stop()
        bodies, level = RequestBodies(settings, (), NAME), LoadLevel(load, mode, [])
        times = sent[level.name]
        # Requests are made before: that takes nothing of the server's engine either. An engine may come further.
        number = len(times) if load.concurrency is None else MORE * len(times)
        requests = [_request(bodies.body(number, mode), model) for number in range(number)]
        seconds = math.inf if settings.seconds is None else settings.seconds
        BareLoad(decoder.engine, level, requests, times, seconds).run()
        keep(summarize(BARE, level))

    def save(outcome: TurnsOutcome) -> Record:
        return make_record(origin, settings, measured, outcome, warmed).kept(output)

    settings = asdict(asked) | {"model": pair.name, "temperature": 1.0}
    origin = provenance(device, command)
    turns = []
    for what, loads, modes, are_bare in _groups(asked):
        names = ", ".join(load.name for load in loads)
        turns.append(Turn(f"{names} over HTTP", partial(over_http, what, loads, modes)))
        if are_bare:
            turns += [Turn(f"{load.name}, the engine alone", partial(bare, what, load, MODES[0])) for load in loads]
    return take_turns(turns, reporter, save, seconds=asked.seconds, tolerant=True)


def _groups(asked: Settings) -> Iterator[tuple[ServeSettings, list[ServerLoad], Sequence[str], bool]]:
    """Loads that one client brings one after the other, and whether the engine alone is given them, too."""
    base = ServeSettings(endpoint="completions", requests=asked.requests, temperature=1.0)
    streams = replace(
        base, seconds=asked.stream_seconds, ramp=asked.ramp, prompt_length=asked.prompt, max_new_tokens=asked.output
    )
    rates = replace(
        base, seconds=asked.rate_seconds, prompt_length=asked.rate_prompt[1], shortest_prompt=asked.rate_prompt[0],
        max_new_tokens=asked.rate_output[1], shortest_answer=asked.rate_output[0],
    )  # fmt: skip
    for are_bare in (True, False):
        if counts := [count for count in asked.streams if (count in asked.bare) == are_bare]:
            yield streams, [ServerLoad(concurrency=count, ramp=asked.ramp) for count in counts], MODES, are_bare
    if asked.rates:
        yield rates, [ServerLoad(rate=rate) for rate in asked.rates], MODES[:1], True


def _request(body: dict[str, Any], model: ServedModel) -> Request:
    """What the server makes of it."""
    (request,) = completion_requests(CompletionBody(**body), [body["prompt"]], model)
    return request


def _options(settings: ServeSettings, loads: Sequence[ServerLoad], modes: Sequence[str]) -> list[str]:
    """Of `forerun bench serve`."""
    counts = [f"{load.concurrency}" for load in loads if load.concurrency is not None]
    rates = [f"{load.rate:g}" for load in loads if load.rate is not None]
    asked = {
        "endpoint": settings.endpoint, "requests": settings.requests, "seconds": settings.seconds,
        "temperature": settings.temperature, "prompt-length": settings.prompt_length,
        "shortest-prompt": settings.shortest_prompt, "max-new-tokens": settings.max_new_tokens,
        "shortest-answer": settings.shortest_answer, "speculation": ",".join(modes),
        "concurrency": ",".join(counts) or None, "ramp": settings.ramp, "rates": ",".join(rates) or None,
    }  # fmt: skip
    return [word for name, value in asked.items() if value is not None for word in (f"--{name}", str(value))]
