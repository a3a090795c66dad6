"""Measuring one scheme after the other; models are built for each and rounded where they lie."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.compiling import compile_apart
from benchmarks.narrow_gpu import keys
from benchmarks.narrow_gpu.report import make_record
from benchmarks.narrow_gpu.results import NarrowResults, Timing
from benchmarks.narrow_gpu.self_draft import ALPHAS, DialledSelfDraft
from forerun.bench.decode.calls import measure_call
from forerun.bench.decode.forward import stepper
from forerun.bench.decode.methods import PLAIN, Decoders
from forerun.bench.decode.pair import ModelPair, open_pair
from forerun.bench.hardware import work_of
from forerun.bench.synthetic import SIZES, build_model, make_bigram_law, parse
from forerun.loading.rounding import round_weights
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.timing import need_gpu, replay_times, timed
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

PAIR = "synthetic:6.7b+0.33b@0.87"
WIDE = "bf16"
PASSES = ((1, 1), (8, 1), (8, 8), (1, 8), (16, 8))
PROMPTS = (512, 4080)  # the model has 4096 positions
BATCHES = (1, 8)
DRAFTED, SELF_DRAFTED = "fixed 8", "fixed 4"
PROMPT_LENGTH, NEW_TOKENS = 448, 96
FREE = 60 << 30  # bytes that are left before another pair is built


@dataclass(frozen=True, slots=True)
class Settings:
    schemes: tuple[str, ...]
    pair: str = PAIR
    repeats: int = 3
    seconds: float = 180.0
    compiled: bool = False


def run(asked: Settings, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    """What goals speak of comes first, for all schemes."""
    device = need_gpu()
    results = NarrowResults(provenance(device, command), asdict(asked))
    if not asked.compiled:
        reporter.start("compiling")
        compile_apart(__name__, "compile_some", list(asked.schemes), asked.pair)
    models = Models(asked, device)

    def attention(kind: str) -> None:
        for context in keys.CONTEXTS:
            taken = keys.seconds(context, keys.KINDS[kind], asked.repeats, device)
            results.keys.append(Timing(kind, f"{context} tokens", taken))

    def turns() -> Iterator[Turn]:
        for kind in keys.KINDS:
            yield Turn(kind, partial(attention, kind))
        for parts in (_passes, _decoding, _prompts):
            for scheme in asked.schemes:
                for what, work in parts(scheme, models, asked.repeats, results):
                    yield Turn(f"{scheme}, {what}", work)

    def save(outcome: TurnsOutcome) -> Record:
        results.notes.update({str(i): problem for i, problem in enumerate(outcome.problems)})
        return make_record(results, WIDE, outcome.complete).kept(output)

    return take_turns(turns(), reporter, save, seconds=asked.seconds, tolerant=True)


class Models:
    """The pair in each scheme, as many of them at a time as fit beside the caches of one."""

    def __init__(self, asked: Settings, device: torch.device) -> None:
        self.asked, self.device = asked, device
        self.pairs: dict[str, ModelPair] = {}
        self.decoders: tuple[object, Decoders] | None = None

    def of(self, scheme: str) -> ModelPair:
        if scheme not in self.pairs:
            self.decoders = None
            if torch.cuda.mem_get_info(self.device)[0] < FREE:
                self.pairs.clear()
            gc.collect()
            torch.cuda.empty_cache()
            pair = open_pair(self.asked.pair, None, self.device, None, 0)
            if scheme != WIDE:
                for model in (pair.target, pair.draft):
                    round_weights(model, scheme, self.device, self.asked.pair)
            self.pairs[scheme] = pair
        return self.pairs[scheme]

    def decoding(self, scheme: str, bits: int = 0) -> Decoders:
        """With the draft model, or with the target's own weights in so many bits."""
        pair, key = self.of(scheme), (scheme, bits)
        if self.decoders is None or self.decoders[0] != key:
            self.decoders = None
            gc.collect()
            torch.cuda.empty_cache()
            draft = DialledSelfDraft(bits, self.asked.pair) if bits else pair.draft
            self.decoders = key, Decoders(pair.target, draft)
        return self.decoders[1]


Parts = Iterator[tuple[str, Callable[[], None]]]


def _passes(scheme: str, models: Models, repeats: int, results: NarrowResults) -> Parts:
    def one_pass(rows: int, positions: int) -> None:
        target = models.of(scheme).target
        results.weight_bytes[scheme] = work_of(target).weight_bytes
        seconds = min(replay_times([stepper(target, rows, positions)], repeats))
        results.timings.append(Timing(scheme, f"pass {rows}x{positions}", seconds))

    for rows, positions in PASSES:
        yield f"pass {rows}x{positions}", partial(one_pass, rows, positions)


def _decoding(scheme: str, models: Models, repeats: int, results: NarrowResults) -> Parts:
    """Plain, with the draft model; with the target's own weights where those are wide."""

    def decode(method: str, batch: int, bits: int = 0) -> None:
        decoders, pair = models.decoding(scheme, bits), models.of(scheme)
        calls = [
            measure_call(
                decoders, method, pair.prompts(batch, PROMPT_LENGTH, seed), max_new_tokens=NEW_TOKENS, seed=seed,
                temperature=1.0,
            )
            for seed in range(repeats + 1)
        ][1:]  # fmt: skip
        best = min(calls, key=lambda call: call.all)
        rounds = sum(call.row_passes for call in calls)
        what = f"{bits} bits of its own, {batch}" if bits else f"{method}, {batch}"
        tokens_a_round = sum(call.tokens for call in calls) / rounds if rounds else None
        results.timings.append(Timing(scheme, what, best.all, tokens_a_round))

    for method in (PLAIN, DRAFTED):
        for batch in BATCHES:
            yield f"{method}, batch {batch}", partial(decode, method, batch)
    for bits in ALPHAS if scheme == WIDE else ():
        yield f"{bits} bits of its own", partial(decode, SELF_DRAFTED, 1, bits)


def _prompts(scheme: str, models: Models, repeats: int, results: NarrowResults) -> Parts:
    def prompt(length: int) -> None:
        decoder, pair = models.decoding(scheme).plain, models.of(scheme)
        ids = torch.tensor(pair.prompts(1, length, 0), device=pair.device)
        call = partial(decoder.generate, ids, max_new_tokens=1, temperature=1.0, seed=0, eos_token_id=[])
        call()
        seconds = min(timed(pair.device, call)[1] for _ in range(repeats))
        results.timings.append(Timing(scheme, f"prompt {length}", seconds))

    for length in PROMPTS:
        yield f"prompt of {length}", partial(prompt, length)


def compile_some(part: int, parts: int, schemes: Sequence[str], pair: str) -> None:
    """The kernels of every `parts`-th pass, over one layer of each model: tiles follow from the width alone."""
    from dataclasses import replace

    device = need_gpu()
    started = perf_counter()
    cases = [(scheme, size, *shape) for scheme in schemes for size in (0, 1) for shape in PASSES]
    for scheme, which, rows, positions in cases[part::parts]:
        if perf_counter() - started > 60:
            return
        name = parse(pair)
        size = replace(SIZES[(name.target, name.draft)[which]], layers=1)
        model: Any = build_model(
            size, make_bigram_law(size.vocab, size.code, 0, device), 0.0, device=device, dtype=torch.bfloat16
        )
        if scheme != WIDE:
            round_weights(model, scheme, device, pair)
        stepper(model, rows, positions, samples=bool(which))()
