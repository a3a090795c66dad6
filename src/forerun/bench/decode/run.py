"""Building the pair, measuring part by part, storing after each: the whole of `forerun bench decode`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.bench.decode.calls import Prompt, TimedCall, measure_call
from forerun.bench.decode.device import ROUNDS, measure_device
from forerun.bench.decode.forward import measure as measure_forward
from forerun.bench.decode.memory import measure_memory
from forerun.bench.decode.methods import AUTO, BASS, METHODS, PLAIN, Decoders
from forerun.bench.decode.pair import open_pair
from forerun.bench.decode.report import make_record
from forerun.bench.decode.results import DecodeResults, PeerCall, Startup
from forerun.bench.decode.settings import LEAST_TOKENS, DecodeSettings
from forerun.bench.hardware import measure_ceilings, work_of
from forerun.bench.methods import METHODS as COMPARED
from forerun.bench.methods import Bench, same_law
from forerun.bench.synthetic import build_pair, measure_alpha
from forerun.measure.progress import Reporter
from forerun.measure.provenance import Provenance, provenance
from forerun.measure.record import Record
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

WATCHED = (PLAIN, "fixed 6")  # whose rounds are looked at with the profiler
MEMORY_BATCH = 8
MEMORY_PROMPT = 8
WIDE = "synthetic:wide+narrow@0.87"  # a large vocabulary, where logits are what takes memory
SAMPLED = {"temperature": 1.0}
PEERS = ("generate", "assisted")
PEER_WARM_UP = 8  # tokens


def run(settings: DecodeSettings, output: Path, reporter: Reporter) -> Record:
    """The most important parts come first; a part that fails is left out and named, and the others go on."""
    origin = provenance(settings.device)
    reporter.start(f"building {settings.model}")
    bench = DecodeBench(settings, origin, reporter)

    def save(outcome: TurnsOutcome) -> Record:
        bench.results.notes = outcome.problems
        return make_record(bench.results, outcome.complete).kept(output)

    return take_turns(bench.parts(), reporter, save, seconds=settings.most_seconds, tolerant=True)


class DecodeBench:
    """The parts of the measurement; each adds what it measures to `results`."""

    def __init__(self, settings: DecodeSettings, origin: Provenance, reporter: Reporter) -> None:
        self.settings, self.reporter = settings, reporter
        pair = open_pair(settings.model, settings.draft, settings.device, settings.dtype, settings.seed)
        shown = {n: v for n, v in asdict(settings).items() if n not in ("device", "model", "draft")}
        shown = {"pair": pair.name, "wanted_alpha": pair.wanted_alpha, **shown}
        self.pair = pair
        self.decoders = Decoders(pair.target, pair.draft)
        self.results = DecodeResults(origin, shown, work_of(pair.target), work_of(pair.draft))
        self._seeds = iter(range(settings.seed, settings.seed + 10_000))

    def parts(self) -> Iterator[Turn]:
        on_gpu = self.pair.device.type == "cuda"
        yield Turn("what the hardware allows", self.ceilings)
        for batch in self.settings.leading:
            yield Turn(f"batch {batch}", partial(self.speeds, batch))
        if on_gpu:
            yield Turn("forward passes", self.forward)
        yield Turn("alpha", self.alpha)
        if on_gpu:
            yield Turn("memory", self.memory)
        yield Turn("transformers", self.peers)
        for batch in self.settings.following:
            yield Turn(f"batch {batch}", partial(self.speeds, batch))
        if on_gpu:  # the last: a profiler that has looked once makes every launch of the process slower from then on
            yield Turn("rounds under the profiler", self.device)

    def ceilings(self) -> None:
        self.results.ceilings = measure_ceilings(self.pair.device, self.pair.target.dtype)

    def alpha(self) -> None:
        plain, pair = self.decoders.plain, self.pair
        self.results.alpha = measure_alpha(pair.target, pair.draft, num_tokens=self.settings.alpha_tokens, plain=plain)

    def speeds(self, batch: int) -> None:
        """Methods take turns, so that a machine that slows down slows all of them; turns go on while there is time."""
        self._warm(batch)
        started = perf_counter()
        for turn in range(self.settings.turns):
            if turn and (turn + 1) / turn * (perf_counter() - started) > self.settings.seconds_a_batch:
                break
            for method in METHODS:
                self.reporter.start(f"batch {batch}, {method}, turn {turn + 1}")
                self.results.calls_made.append(self._call(method, batch, self.settings.new_tokens))

    def _warm(self, batch: int) -> None:
        """Compiles, captures, lets `auto` learn. Drafts meet most shapes while rows finish: those calls are whole."""
        started, before = perf_counter(), self._capturing()
        for method in (*METHODS, BASS, AUTO):  # those whose lengths change meet new ones in a second call as well
            self.reporter.start(f"batch {batch}, {method}, first call")
            self._call(method, batch, self.settings.new_tokens if method != PLAIN else LEAST_TOKENS)
        self.results.startups.append(Startup(batch, perf_counter() - started, self._capturing() - before))

    def _capturing(self) -> float:
        """Seconds that the engines have spent capturing graphs."""
        return sum(decoder.engine.seconds.capture for decoder in (self.decoders.plain, self.decoders.drafting))

    def _call(self, method: str, batch: int, new_tokens: int) -> TimedCall:
        seed = next(self._seeds)
        return measure_call(
            self.decoders, method, self._prompts(batch, seed), max_new_tokens=new_tokens, seed=seed, **SAMPLED
        )

    def _prompts(self, count: int, seed: int) -> list[Prompt]:
        return self.pair.prompts(count, self.settings.prompt_length, seed)

    def forward(self) -> None:
        self.results.forward = measure_forward(self.pair.target, self.pair.draft)

    def device(self) -> None:
        for batch in self.settings.leading:
            for method in WATCHED:
                room = {"max_new_tokens": (ROUNDS + 4) * 8, "seed": 0, **SAMPLED}
                timed = measure_device(self.decoders, method, self._prompts(batch, 0), **room)
                self.results.device_times.append(timed)

    def memory(self) -> None:
        self._memory(self.pair.target, self.pair.draft, self.settings.memory_lengths)
        wide = build_pair(WIDE, device=self.pair.device, dtype=self.settings.dtype, seed=self.settings.seed)
        self._memory(wide.target, wide.draft, self.settings.wide_lengths)

    def _memory(self, target: Any, draft: Any, lengths: Sequence[int]) -> None:
        ids = torch.arange(1, 1 + MEMORY_BATCH * MEMORY_PROMPT).view(MEMORY_BATCH, MEMORY_PROMPT).tolist()
        for length in lengths:
            self.reporter.start(f"memory, drafts of {length}")
            self.results.memory.append(measure_memory(target, draft, length, ids))

    def peers(self) -> None:
        """transformers plainly for every batch, assisted where there is one row: it takes no more."""
        pair, tokens = self.pair, self.settings.peer_tokens
        bench = Bench(pair.target, None, SAMPLED["temperature"], self.settings.seed, draft=pair.draft)
        with same_law(pair.target, pair.draft):
            for batch in self.settings.leading:
                prompts = self._prompts(batch, self.settings.seed)
                for method in (COMPARED[name](bench) for name in PEERS):
                    if method.refusal(batch) is None:
                        method.run(prompts, PEER_WARM_UP)
                        call = method.run(prompts, tokens)
                        self.results.peers.append(
                            PeerCall(method.title, batch, tokens, call.seconds, call.rounds // batch)
                        )
