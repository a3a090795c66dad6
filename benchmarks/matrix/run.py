"""Carrying out the measurement: every seed once for nobody and once for the clock, cell after cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.matrix.cells import Cell, Makers, cells, sampling
from benchmarks.matrix.report import make_record
from benchmarks.matrix.results import Measurement
from forerun.bench.decode.pair import ModelPair, default_pair, open_pair
from forerun.decoder import SpeculativeDecoder
from forerun.engine import Engine, Request
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.rounds import SKIP
from forerun.measure.turns import Turn, TurnsOutcome, take_turns


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = None  # None: what suits the device
    draft: str | None = None
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (128, 3072)
    tokens: int = 96
    repeats: int = 2
    only: str = ""  # cells whose name holds this, and those they are held against
    seconds: float | None = None


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    """All cells with one pair; a cell that fails is named and the others still run."""
    reporter.start("building the pair")
    pair = open_pair(asked.model or default_pair(device), asked.draft, device, None, 0)
    settings = asdict(asked) | {"model": pair.name, "temperature": 1.0}
    origin, makers, measured = provenance(device, command), Makers(pair), list[Measurement]()
    decoders: dict[tuple[str, int | str, str], SpeculativeDecoder] = {}

    def measure(cell: Cell) -> None:
        key = cell.drafter, cell.policy, cell.rule
        if key not in decoders:
            decoders.clear()  # one at a time: each holds keys and recordings
            decoders[key] = SpeculativeDecoder(
                pair.target, makers.get(cell.drafter), policy=cell.policy, rule=cell.rule
            )
        measured.append(measure_cell(decoders[key], pair, cell, asked))

    def save(outcome: TurnsOutcome) -> Record:
        return make_record(origin, settings, tuple(measured), outcome).kept(output)

    chosen = select(cells(asked.batches, asked.contexts), asked.only)
    chosen.sort(key=lambda cell: (cell.drafter, str(cell.policy), cell.rule))  # each decoder is made once
    turns = [Turn(cell.name, partial(measure, cell)) for cell in chosen]
    return take_turns(turns, reporter, save, seconds=asked.seconds, tolerant=True)


def select(known: list[Cell], only: str) -> list[Cell]:
    """Cells that were asked for, and those they are held against."""
    asked = [cell for cell in known if only in cell.name]
    names = {name for cell in asked for name in (cell.name, cell.base, cell.plain)}
    return [cell for cell in known if cell.name in names]


def measure_cell(decoder: SpeculativeDecoder, pair: ModelPair, cell: Cell, asked: Settings) -> Measurement:
    """Rounds from the third on of one call a seed."""
    seeds, timed = range(1, asked.repeats + 1), cell.batch - cell.first_timed
    tokens = cell.tokens(asked.tokens)
    for seed in seeds:
        decode(decoder.engine, pair, cell, tokens, seed)
    calls = [decode(decoder.engine, pair, cell, tokens, seed) for seed in seeds]
    if not all(call.seconds for call in calls):
        raise InvalidArgument(f"a row of {tokens} tokens ended within three rounds; give more --tokens")
    return Measurement(
        cell=cell,
        round_seconds=tuple(median(call.seconds) for call in calls),
        token_seconds=tuple(sum(call.seconds) * timed / call.tokens for call in calls),
        tokens_per_round=sum(call.tokens for call in calls) / sum(len(call.seconds) * timed for call in calls),
        capture_seconds=sum(call.captured for call in calls),
    )


@dataclass(slots=True)
class Call:
    seconds: list[float]  # of each round
    tokens: int = 0  # of the rows that are timed
    captured: float = 0.0


def decode(engine: Engine, pair: ModelPair, cell: Cell, tokens: int, seed: int) -> Call:
    """One batch to its end. Rounds after the first row has ended are not counted: they are of another batch."""
    engine.begins_together = True
    prompts = pair.prompts(cell.batch, cell.context, seed)
    for number, (prompt, more) in enumerate(zip(prompts, cell.requests(), strict=True)):
        engine.add(
            Request(
                prompt=prompt, max_new_tokens=tokens, seed=seed, request_id=number, params=sampling(more),
                **{name: value for name, value in more.items() if name != "params"},
            )
        )  # fmt: skip
    rounds, ended = 0, False
    call = Call([])
    while not engine.is_idle:
        before, captured = perf_counter(), engine.seconds.capture
        progress = engine.step()
        taken, lost = perf_counter() - before, engine.seconds.capture - captured
        rounds += 1
        if rounds > SKIP and not ended:
            call.seconds.append(taken - lost)
            call.tokens += sum(len(row.tokens) for row in progress if row.request_id >= cell.first_timed)
            call.captured += lost
        ended = ended or any(row.finish_reason is not None for row in progress)
    engine.take_results()
    return call
