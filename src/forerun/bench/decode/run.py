"""Building the pair, measuring part by part, storing after each: the whole of `forerun bench decode`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.bench.decode.calls import Call, Prompt, measure_call
from forerun.bench.decode.ceilings import Ceilings, measure_ceilings
from forerun.bench.decode.device import ROUNDS, DeviceTime, measure_device
from forerun.bench.decode.memory import Memory, measure_memory
from forerun.bench.decode.methods import AUTO, BASS, METHODS, PLAIN, Decoders
from forerun.bench.decode.pair import Pair, open_pair
from forerun.bench.decode.peers import Peer, measure_peers
from forerun.bench.decode.plan import LEAST_TOKENS, Plan
from forerun.bench.decode.record import DecodeRecord, Startup
from forerun.bench.decode.report import summary
from forerun.bench.forward import Forward
from forerun.bench.forward import measure as measure_forward
from forerun.bench.listening import Listener
from forerun.bench.records import write
from forerun.bench.synthetic import build_pair, measure_alpha
from forerun.bench.work import work_of
from forerun.measure.provenance import Provenance, provenance

WATCHED = (PLAIN, "fixed 6")  # whose rounds are looked at with the profiler
MEMORY_BATCH = 8
MEMORY_PROMPT = 8
WIDE = "synthetic:wide+narrow@0.87"  # a large vocabulary, where logits are what takes memory
SAMPLED = {"temperature": 1.0}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the run whose loss leaves the others whole."""

    title: str
    work: Callable[[], None]


@dataclass(slots=True)
class Found:
    """What has been measured so far."""

    calls: list[Call] = field(default_factory=list)
    ceilings: Ceilings | None = None
    alpha: float | None = None
    forward: Forward | None = None
    startups: list[Startup] = field(default_factory=list)
    device_times: list[DeviceTime] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def carry_out(plan: Plan, output: Path, listener: Listener, command: Sequence[str]) -> DecodeRecord:
    """Ctrl-C ends it, a part that fails is left out and named; whatever was measured is stored."""
    origin = provenance(plan.device, command)
    listener.starting(f"building {plan.model}")
    pair = open_pair(plan.model, plan.draft, plan.device, plan.dtype, plan.seed)
    bench = Bench(plan, pair, listener)
    parts = list(bench.parts())
    listener.starting("measuring", total=len(parts))
    record = bench.record(origin, complete=False)
    late = perf_counter() + plan.most_seconds
    for part in parts:
        try:
            bench.carry_out(part, late)
        except KeyboardInterrupt:
            break
        listener.advance()
        record = bench.record(origin, complete=part is parts[-1] and not bench.left_out)
        _store(record, output)
    return record


def _store(record: DecodeRecord, output: Path) -> None:
    if record.measurements:
        write(record, output, summary(record))


class Bench:
    """The parts, the most important ones first, and what they find."""

    def __init__(self, plan: Plan, pair: Pair, listener: Listener) -> None:
        self.plan, self.pair, self.listener = plan, pair, listener
        self.decoders = Decoders(pair.target, pair.draft)
        self.found = Found()
        self.left_out = False  # whether some part was
        self._seeds = iter(range(plan.seed, plan.seed + 10_000))

    def parts(self) -> Iterator[Part]:
        on_gpu = self.pair.device.type == "cuda"
        yield Part("what the hardware allows", self.ceilings)
        for batch in self.plan.leading:
            yield Part(f"batch {batch}", partial(self.speeds, batch))
        if on_gpu:
            yield Part("forward passes", self.forward)
            yield Part("rounds under the profiler", self.device)
        yield Part("alpha", self.alpha)
        if on_gpu:
            yield Part("memory", self.memory)
        yield Part("transformers", self.peers)
        for batch in self.plan.following:
            yield Part(f"batch {batch}", partial(self.speeds, batch))

    def carry_out(self, part: Part, late: float) -> None:
        """One part, unless it is late; one that fails is named, and the next ones do not suffer."""
        if perf_counter() > late:
            self.left_out = True
            self.found.notes.append(f"{part.title} was left out, for it was late")
            return
        self.listener.starting(part.title)
        try:
            part.work()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.found.notes.append(f"{part.title} failed ({why})")

    def record(self, origin: Provenance, complete: bool) -> DecodeRecord:
        plan, pair, found = self.plan, self.pair, self.found
        asked = {name: value for name, value in asdict(plan).items() if name not in ("device", "model", "draft")}
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}
        return DecodeRecord(
            provenance=origin,
            settings={"pair": pair.name, "wanted_alpha": pair.wanted_alpha, **settings},
            target=work_of(pair.target),
            draft=work_of(pair.draft),
            complete=complete,
            measurements=tuple(found.calls),
            ceilings=found.ceilings,
            alpha=found.alpha,
            forward=found.forward,
            startups=tuple(found.startups),
            device_times=tuple(found.device_times),
            memory=tuple(found.memory),
            peers=tuple(found.peers),
            notes=tuple(found.notes),
        )

    def ceilings(self) -> None:
        self.found.ceilings = measure_ceilings(self.pair.device, self.pair.target.dtype)

    def alpha(self) -> None:
        plain, pair = self.decoders.plain, self.pair
        self.found.alpha = measure_alpha(pair.target, pair.draft, num_tokens=self.plan.alpha_tokens, plain=plain)

    def speeds(self, batch: int) -> None:
        """Methods take turns, so that a machine that slows down slows all of them; turns go on while there is time."""
        self._warm(batch)
        started = perf_counter()
        for turn in range(self.plan.turns):
            if turn and (turn + 1) / turn * (perf_counter() - started) > self.plan.seconds_a_batch:
                break
            for method in METHODS:
                self.listener.starting(f"batch {batch}, {method}, turn {turn + 1}")
                self.found.calls.append(self._call(method, batch, self.plan.new_tokens))

    def _warm(self, batch: int) -> None:
        """Compiles, captures, lets `auto` learn. Drafts meet most shapes while rows finish: those calls are whole."""
        started, before = perf_counter(), self._capturing()
        for method in (*METHODS, BASS, AUTO):  # those whose lengths change meet new ones in a second call as well
            self.listener.starting(f"batch {batch}, {method}, first call")
            self._call(method, batch, self.plan.new_tokens if method != PLAIN else LEAST_TOKENS)
        after = self._capturing()
        told = None if before is None or after is None else after - before
        self.found.startups.append(Startup(batch, perf_counter() - started, told))

    def _capturing(self) -> float | None:
        """Seconds that the engines spent capturing graphs; None where they do not tell."""
        both = (self.decoders.plain, self.decoders.drafting)
        found = [getattr(decoder.engine.seconds, "capture_seconds", None) for decoder in both]
        told = [each for each in found if each is not None]
        return sum(told) if len(told) == len(both) else None

    def _call(self, method: str, batch: int, new_tokens: int) -> Call:
        seed = next(self._seeds)
        return measure_call(
            self.decoders, method, self._prompts(batch, seed), max_new_tokens=new_tokens, seed=seed, **SAMPLED
        )

    def _prompts(self, count: int, seed: int) -> list[Prompt]:
        return self.pair.prompts(count, self.plan.prompt_length, seed)

    def forward(self) -> None:
        self.found.forward = measure_forward(self.pair.target, self.pair.draft)

    def device(self) -> None:
        for batch in self.plan.leading:
            for method in WATCHED:
                room = {"max_new_tokens": (ROUNDS + 4) * 8, "seed": 0, **SAMPLED}
                found = measure_device(self.decoders, method, self._prompts(batch, 0), **room)
                self.found.device_times.append(found)

    def memory(self) -> None:
        self._memory(self.pair.target, self.pair.draft, self.plan.memory_lengths)
        wide = build_pair(WIDE, device=self.pair.device, dtype=self.plan.dtype, seed=self.plan.seed)
        self._memory(wide.target, wide.draft, self.plan.wide_lengths)

    def _memory(self, target: Any, draft: Any, lengths: Sequence[int]) -> None:
        ids = torch.arange(1, 1 + MEMORY_BATCH * MEMORY_PROMPT).view(MEMORY_BATCH, MEMORY_PROMPT).tolist()
        for length in lengths:
            self.listener.starting(f"memory, drafts of {length}")
            self.found.memory.append(measure_memory(target, draft, length, ids))

    def peers(self) -> None:
        asked = [self._prompts(batch, self.plan.seed) for batch in self.plan.leading]
        for peer in measure_peers(self.pair.target, self.pair.draft, asked, self.plan.peer_tokens, self.plan.seed):
            self.found.peers.append(peer)
