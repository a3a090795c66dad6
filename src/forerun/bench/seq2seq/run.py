"""Carrying out the measurement: encoder, recording and decoding apart, one record in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forerun.bench.listening import Listener
from forerun.bench.records import Provenance, provenance, write
from forerun.bench.seq2seq.pair import Pair, build
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel

KIND = "seq2seq"
THEIR_TOKENS = 12  # transformers is there for comparison, and slow
PLAIN, DRAFTS, THEIRS = "plain", "drafts", "transformers"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way of decoding one batch; the encoder and the recording of graphs are measured apart."""

    pair: str
    batch: int
    way: str
    seconds: tuple[float, ...]  # one entry a repeat
    tokens: int  # new ones of all rows, of each repeat
    encoder_seconds: float
    capture_seconds: float = 0.0  # all repeats together, not part of `seconds`
    tokens_per_round: float | None = None
    acceptance_rate: float | None = None

    @property
    def milliseconds_a_token(self) -> float:
        """Of a row, whatever the batch."""
        return 1e3 * median(self.seconds) * self.batch / self.tokens


@dataclass(frozen=True, slots=True)
class Seq2SeqRecord:
    provenance: Provenance
    settings: dict[str, Any]
    measurements: tuple[Measurement, ...]
    complete: bool
    kind: str = KIND

    def ratio(self, pair: str, batch: int, base: str = PLAIN) -> float | None:
        """How many times as fast drafts are as `base`."""
        found = {m.way: m.milliseconds_a_token for m in self.measurements if (m.pair, m.batch) == (pair, batch)}
        return found[base] / found[DRAFTS] if base in found and DRAFTS in found else None


@dataclass(frozen=True, slots=True)
class Settings:
    pairs: tuple[str, ...] = ("whisper-large", "t5-xxl")
    batches: tuple[int, ...] = (1, 8)
    alpha: float = 0.87
    draft_length: int = 6
    tokens: int = 48
    repeats: int = 3
    compile: bool = True


def carry_out(
    asked: Settings, device: torch.device, output: Path, tell: Listener, command: Sequence[str]
) -> Seq2SeqRecord:
    """Everything asked for; the record is written after every pair and batch, so that an interrupt leaves the rest."""
    began, found = provenance(device, command), []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = {name: getattr(asked, name) for name in asked.__slots__} | {"dtype": str(dtype), "temperature": 1.0}
    for name in asked.pairs:
        tell.starting(f"building {name}")
        pair = build(name, asked.alpha, device=device, dtype=dtype)
        for batch in asked.batches:
            tell.starting(f"{name}, batch {batch}")
            found += _measured(name, pair, batch, asked)
            record = Seq2SeqRecord(
                began, settings, tuple(found), name == asked.pairs[-1] and batch == asked.batches[-1]
            )
            write(record, output, summary(record))
        del pair
    return record


def summary(record: Seq2SeqRecord) -> dict[str, Any]:
    places = dict.fromkeys((m.pair, m.batch) for m in record.measurements)
    return {f"{pair}, batch {batch}: drafts over plain": record.ratio(pair, batch) for pair, batch in places}


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
        return lambda tokens, seed: decoders[way].generate(
            encoder_outputs=states, max_new_tokens=tokens, temperature=1.0, seed=seed
        )

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
    seconds, recorded, last = [], 0.0, None
    for seed in seeds:
        run(tokens, seed)
        took, last = _timed(partial(run, tokens, seed))
        capture = getattr(getattr(last, "stats", None), "capture_seconds", 0.0)
        seconds.append(took - capture)
        recorded += capture
    return Measurement(pair, batch, way, tuple(seconds), batch * tokens, encoder, recorded, *_counts(last))


def _transformers(model: Any, states: Any, tokens: int) -> Any:
    from transformers import GenerationMixin

    return GenerationMixin.generate(
        model, encoder_outputs=states, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens, pad_token_id=0
    )


def _counts(result: Any) -> tuple[float | None, float | None]:
    stats = getattr(result, "stats", None)
    return (None, None) if stats is None else (stats.tokens_per_round, stats.acceptance_rate)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    started = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - started, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
