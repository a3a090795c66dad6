"""Carrying out the measurement: every load with every method, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.arrivals.report import make_record
from benchmarks.arrivals.results import Measurement, WarmedUp, summarize
from benchmarks.arrivals.serve import serve
from benchmarks.arrivals.traffic import Load, arrivals
from forerun.bench.decode.pair import ModelPair, default_pair, open_pair
from forerun.bench.prompts import encode, find_questions
from forerun.bench.synthetic import is_synthetic
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.errors import InvalidArgument
from forerun.loading import load_model
from forerun.loading.load import STORED
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.timing import timed
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

PLAIN, WITH_DRAFT, DEFAULT = "plain", "draft model", "default"
METHODS = (PLAIN, WITH_DRAFT, DEFAULT)
"""The last is what a decoder drafts with where nobody chooses."""


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = None  # None: what suits the device
    draft: str | None = None
    methods: tuple[str, ...] = ()  # empty: all that the models allow
    rates: tuple[float, ...] = (8.0, 32.0)
    seconds: float = 20.0
    prompt: tuple[int, int] = (32, 512)
    output: tuple[int, int] = (32, 256)
    penalised: tuple[float, ...] = (0.0, 0.1)
    shared: int = 0
    temperature: float = 1.0
    max_rows: int = 64
    max_draft: int = 8
    warm: bool = True
    warm_up_only: bool = False
    context: int | None = None  # tokens of a text that the warm-up counts with; None: those that can come


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    if asked.warm_up_only and not asked.warm:
        raise InvalidArgument("--warm-up-only --cold: give one of the two")
    if unknown := set(asked.methods) - set(METHODS):
        raise InvalidArgument(f"--methods={sorted(unknown)}: choose among {', '.join(METHODS)}")
    reporter.start("building the pair")
    pair, built = timed(device, lambda: _open(asked, device))
    methods = asked.methods or tuple(method for method in METHODS if _is_possible(method, pair))
    if refused := [method for method in methods if not _is_possible(method, pair)]:
        what = "give --draft" if refused == [WITH_DRAFT] else "drafts are looked for in text: give --model"
        raise InvalidArgument(f"--methods={refused}: {pair.name} has none; {what}")
    texts, source = _texts(pair)
    settings = asdict(asked) | {"model": pair.name, "methods": methods, "prompts": source}
    origin, measured = provenance(device, command), list[Measurement]()
    decoders: dict[str, SpeculativeDecoder] = {}
    warmed: dict[str, WarmedUp] = {}

    def prepare(method: str) -> None:
        if method not in decoders:
            decoders.clear()  # one at a time: each holds keys and recordings
            decoders[method] = _decoder(pair, method)
            if asked.warm:
                reporter.start(f"warming up, {method}")
                warmed[method] = _warm_up(decoders[method], asked)

    def measure(method: str, rate: float, penalised: float) -> None:
        load = Load(rate, asked.seconds, asked.prompt, asked.output, penalised, asked.shared, asked.temperature)
        prepare(method)
        traffic = arrivals(load, pair.target.config.vocab_size, texts)
        outcome = serve(decoders[method].engine, traffic, asked.max_rows)
        measured.append(summarize(method, rate, penalised, asked.shared, outcome))

    def save(outcome: TurnsOutcome) -> Record:
        return make_record(origin, settings, measured, outcome, warmed, built).kept(output)

    if asked.warm_up_only:
        return take_turns([Turn(method, partial(prepare, method)) for method in methods], reporter, save, tolerant=True)
    turns = [
        Turn(f"{method}, {rate:g} a second, {penalised:.0%} penalised", partial(measure, method, rate, penalised))
        for method in methods
        for rate in asked.rates
        for penalised in asked.penalised
    ]
    return take_turns(turns, reporter, save, tolerant=True)


def _open(asked: Settings, device: torch.device) -> ModelPair:
    """A model without a draft is loaded as `forerun.load` does."""
    name = asked.model or default_pair(device)
    if asked.draft is not None or is_synthetic(name):
        return open_pair(name, asked.draft, device, None, 0)
    target, tokenizer = load_model(name, device=device, dtype=STORED)
    return ModelPair(name, target, None, tokenizer, None)


def _is_possible(method: str, pair: ModelPair) -> bool:
    """Models that speak no language have nothing that the default drafts could be found in."""
    return {PLAIN: True, WITH_DRAFT: pair.draft is not None, DEFAULT: pair.tokenizer is not None}[method]


def _texts(pair: ModelPair) -> tuple[list[tuple[int, ...]], str]:
    """What is asked, and where it comes from, for the record."""
    if pair.tokenizer is None:
        return [], "random tokens"
    questions = find_questions()
    return encode(pair.tokenizer, questions.items), questions.source


def _decoder(pair: ModelPair, method: str) -> SpeculativeDecoder:
    if method == DEFAULT:
        return SpeculativeDecoder(pair.target, tokenizer=pair.tokenizer)
    return SpeculativeDecoder(pair.target, DraftModel(pair.draft) if method == WITH_DRAFT else None)


def _warm_up(decoder: SpeculativeDecoder, asked: Settings) -> WarmedUp:
    """Everything that such loads can meet."""
    context = asked.context or asked.shared + asked.prompt[1] + asked.output[1]
    done = decoder.engine.warm_up(asked.max_rows, asked.max_draft, context)
    return WarmedUp(asked.max_rows, asked.max_draft, context, decoder.engine.num_recordings, **asdict(done))
