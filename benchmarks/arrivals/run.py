"""Carrying out the measurement: every load with every method, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.arrivals.report import make_record
from benchmarks.arrivals.results import Measurement, summarize
from benchmarks.arrivals.serve import serve
from benchmarks.arrivals.traffic import Load, arrivals
from forerun.bench.decode.pair import Pair, default_pair, open_pair
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.engine.device.warm_up import WarmUp
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.turns import Outcome, Turn, take_turns

METHODS = ("plain", "draft model")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = None  # None: what suits the device
    draft: str | None = None
    methods: tuple[str, ...] = METHODS
    rates: tuple[float, ...] = (8.0, 32.0)
    seconds: float = 20.0
    prompt: tuple[int, int] = (32, 512)
    output: tuple[int, int] = (32, 256)
    penalised: tuple[float, ...] = (0.0, 0.1)
    shared: int = 0
    max_rows: int = 64
    max_draft: int = 8
    warm: bool = True


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    if unknown := set(asked.methods) - set(METHODS):
        raise InvalidArgument(f"--methods={sorted(unknown)}: choose among {', '.join(METHODS)}")
    reporter.start("building the pair")
    pair = open_pair(asked.model or default_pair(device), asked.draft, device, None, 0)
    settings = asdict(asked) | {"model": pair.name, "temperature": 1.0}
    origin, measured = provenance(device, command), list[Measurement]()
    decoders: dict[str, SpeculativeDecoder] = {}
    warmed: dict[str, WarmUp] = {}

    def measure(method: str, rate: float, penalised: float) -> None:
        load = Load(rate, asked.seconds, asked.prompt, asked.output, penalised, asked.shared)
        if method not in decoders:
            decoders.clear()  # one at a time: each holds keys and recordings
            decoders[method] = _decoder(pair, method)
            if asked.warm:
                reporter.start(f"warming up, {method}")
                warmed[method] = _warm_up(decoders[method], load, asked)
        outcome = serve(decoders[method].engine, arrivals(load, pair.target.config.vocab_size), asked.max_rows)
        measured.append(summarize(method, rate, penalised, asked.shared, outcome))

    def save(outcome: Outcome) -> Record:
        return make_record(origin, settings, measured, outcome, warmed).kept(output)

    turns = [
        Turn(f"{method}, {rate:g} a second, {penalised:.0%} penalised", partial(measure, method, rate, penalised))
        for method in asked.methods
        for rate in asked.rates
        for penalised in asked.penalised
    ]
    return take_turns(turns, reporter, save, tolerant=True)


def _decoder(pair: Pair, method: str) -> SpeculativeDecoder:
    drafter = DraftModel(pair.draft) if method == "draft model" else None
    return SpeculativeDecoder(pair.target, drafter)


def _warm_up(decoder: SpeculativeDecoder, load: Load, asked: Settings) -> WarmUp:
    """Everything that such a load can meet."""
    context = load.shared + load.prompt[1] + load.output[1]
    return decoder.engine.warm_up(asked.max_rows, asked.max_draft, context)
