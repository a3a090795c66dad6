"""Carrying out the measurement: encoder, recording and decoding apart, one record in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from forerun.bench.listening import Listener
from forerun.bench.records import write
from forerun.bench.seq2seq.pair import Pair, build
from forerun.bench.seq2seq.record import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqRecord
from forerun.bench.seq2seq.report import summary
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.engine import Stats
from forerun.measure.provenance import provenance
from forerun.measure.rounds import Trace, follow

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


def carry_out(
    asked: Settings, device: torch.device, output: Path, tell: Listener, command: Sequence[str]
) -> Seq2SeqRecord:
    """Everything asked for; the record is written after every pair and batch, so that an interrupt leaves the rest."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = {name: getattr(asked, name) for name in asked.__slots__} | {"dtype": str(dtype), "temperature": 1.0}
    record = Seq2SeqRecord(provenance(device, command), settings, (), False)
    number = len(asked.pairs) * len(asked.batches)
    tell.starting("building", number)
    try:
        for found in _all(asked, device, dtype, tell):
            record = replace(record, measurements=(*record.measurements, *found))
            record = replace(record, complete=len(record.places) == number)
            write(record, output, summary(record))
            tell.advance()
    except KeyboardInterrupt:
        pass
    return record


def _all(asked: Settings, device: torch.device, dtype: torch.dtype, tell: Listener) -> Iterator[list[Measurement]]:
    """One pair and batch after the other; one pair is in memory at a time."""
    for name in asked.pairs:
        tell.starting(f"building {name}")
        pair = build(name, asked.alpha, device=device, dtype=dtype)
        for batch in asked.batches:
            tell.starting(f"{name}, batch {batch}")
            yield _measured(name, pair, batch, asked)
        del pair


def _measured(name: str, pair: Pair, batch: int, asked: Settings) -> list[Measurement]:
    states = pair.states(batch)
    encoder = min(_timed(lambda: pair.states(batch))[0] for _ in range(2))
    settings: dict[str, Any] = {"compile": asked.compile}
    drafter = DraftModel(pair.draft, shares_encoder=True)
    decoders = {
        PLAIN: SpeculativeDecoder(pair.target, None, **settings),
        DRAFTS: SpeculativeDecoder(pair.target, drafter, policy=asked.draft_length, **settings),
    }

    def ours(way: str) -> Callable[[int, int], Any]:
        decoder = decoders[way]

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
    measured = [_repeated(name, batch, way, ours(way), seeds, asked.tokens, encoder) for way in (PLAIN, DRAFTS)]
    return [*measured, _repeated(name, batch, THEIRS, theirs, seeds[:1], min(asked.tokens, THEIR_TOKENS), encoder)]


def _repeated(
    pair: str, batch: int, way: str, run: Callable[[int, int], Any], seeds: Sequence[int], tokens: int, encoder: float
) -> Measurement:
    """Every seed once for nobody and once for the clock: how rows end decides which shapes have to be recorded."""
    for seed in seeds:
        run(tokens, seed)
    calls = [_timed(partial(run, tokens, seed)) for seed in seeds]
    traces = [made for _, made in calls if isinstance(made, Trace)]
    later = [trace for trace in traces if trace.rounds]
    captured = [made.stats.capture_seconds if isinstance(made, Trace) else 0.0 for _, made in calls]
    return Measurement(
        pair, batch, way, tuple(took - lost for (took, _), lost in zip(calls, captured, strict=True)),
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


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    started = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - started, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
