"""Carrying out the measurement: encoder, recording and decoding apart, one record in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.seq2seq.pair import Pair, build
from benchmarks.seq2seq.report import make_record
from benchmarks.seq2seq.results import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqResults
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.engine import Stats
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.rounds import Trace, follow
from forerun.measure.timing import timed
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

THEIR_TOKENS = 12  # transformers is there for comparison, and slow


@dataclass(frozen=True, slots=True)
class Settings:
    pairs: tuple[str, ...] = ("whisper-large", "t5-xxl")
    batches: tuple[int, ...] = (1, 8)
    alpha: float = 0.87
    draft_length: int = 6
    tokens: int = 128
    repeats: int = 3
    compile: bool = True


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    """One pair is in memory at a time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = asdict(asked) | {"dtype": str(dtype), "temperature": 1.0}
    origin = provenance(device, command)
    measurements: list[Measurement] = []
    pairs: dict[str, Pair] = {}

    def measure_pair(name: str, batch: int) -> None:
        if name not in pairs:
            pairs.clear()
            reporter.start(f"building {name}")
            pairs[name] = build(name, asked.alpha, device=device, dtype=dtype)
        measurements.extend(_measured(name, pairs[name], batch, asked))

    def save(outcome: TurnsOutcome) -> Record:
        return make_record(Seq2SeqResults(origin, settings, tuple(measurements)), outcome.complete).kept(output)

    turns = [
        Turn(f"{name}, batch {batch}", partial(measure_pair, name, batch))
        for name in asked.pairs
        for batch in asked.batches
    ]
    return take_turns(turns, reporter, save)


def _measured(name: str, pair: Pair, batch: int, asked: Settings) -> list[Measurement]:
    states, device = pair.states(batch), pair.target.device
    encoder = min(timed(pair.target.device, lambda: pair.states(batch))[1] for _ in range(2))
    settings: dict[str, Any] = {"compile": asked.compile}
    drafter = DraftModel(pair.draft, shares_encoder=True)
    decoders = {
        PLAIN: SpeculativeDecoder(pair.target, None, **settings),
        DRAFTS: SpeculativeDecoder(pair.target, drafter, policy=asked.draft_length, **settings),
    }

    def ours(method: str) -> Callable[[int, int], Any]:
        decoder = decoders[method]

        def call(tokens: int, seed: int) -> Trace:
            return follow(
                decoder,
                decoder.stream(encoder_outputs=states, max_new_tokens=tokens, temperature=1.0, seed=seed),
                wait=False,
            )

        return call

    def theirs(tokens: int, seed: int) -> Any:
        torch.manual_seed(seed)
        return _transformers(pair.target, states, tokens)

    seeds = range(1, asked.repeats + 1)
    measured = [
        _repeated(name, batch, method, ours(method), seeds, asked.tokens, encoder, device) for method in (PLAIN, DRAFTS)
    ]
    return [
        *measured,
        _repeated(name, batch, THEIRS, theirs, seeds[:1], min(asked.tokens, THEIR_TOKENS), encoder, device),
    ]


def _repeated(
    pair: str,
    batch: int,
    method: str,
    call: Callable[[int, int], Any],
    seeds: Sequence[int],
    tokens: int,
    encoder: float,
    device: torch.device,
) -> Measurement:
    """Every seed once for nobody and once for the clock: how rows end decides which shapes have to be recorded."""
    for seed in seeds:
        call(tokens, seed)
    calls = [timed(device, partial(call, tokens, seed)) for seed in seeds]
    traces = [output for output, _ in calls if isinstance(output, Trace)]
    later = [trace for trace in traces if trace.rounds]
    captured = [output.stats.seconds.capture if isinstance(output, Trace) else 0.0 for output, _ in calls]
    return Measurement(
        pair, batch, method, tuple(took - lost for (_, took), lost in zip(calls, captured, strict=True)),
        batch * tokens, encoder, tuple(fmean(trace.latencies()) for trace in later),
        tuple(median(r.seconds for r in trace.rounds) for trace in later), sum(captured), *_counts(traces),
    )  # fmt: skip


def _transformers(model: Any, states: Any, tokens: int) -> Any:
    from transformers import GenerationMixin

    return GenerationMixin.generate(
        model, encoder_outputs=states, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens, pad_token_id=0
    )


def _counts(traces: Sequence[Trace]) -> tuple[float | None, float | None]:
    """Tokens a round and acceptance rate over all repeats."""
    if not traces:
        return None, None
    total = Stats.total([trace.stats for trace in traces])
    return total.tokens_per_round, total.acceptance_rate
