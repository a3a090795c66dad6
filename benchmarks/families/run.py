"""Measuring one family after the other, each by all methods before the next is built."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.cpu_steps import steps as cpu_steps
from benchmarks.families.report import PASSES, make_record
from benchmarks.families.results import FUSED, MODULES, PASS, TRANSFORMERS, FamilyResults, Step
from benchmarks.families.shapes import build
from forerun.bench.decode.forward import stepper
from forerun.bench.hardware import work_of
from forerun.config import Kernels
from forerun.decoder import SpeculativeDecoder
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.timing import copy_bandwidth, replay_times, timed
from forerun.measure.turns import Outcome, Turn, take_turns
from forerun.models.bodies import choose

ROWS = (1, 8)
PROMPT, FEW, MANY = 64, 8, 40  # tokens; the difference of two calls leaves out prompt and recording
CACHE_TOKENS = 2048  # of all rows
CPU_GRID = cpu_steps.Grid(batches=(1,), tokens=(1, 4), past=256)


@dataclass(frozen=True, slots=True)
class Settings:
    families: tuple[str, ...]
    repeats: int = 3
    methods: tuple[str, ...] = (MODULES, TRANSFORMERS)  # beside fused layers
    compile_only: bool = False  # run everything once and time nothing: kernels are compiled and kept on disk


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    """A family that fails leaves a note, and the others are measured."""
    on_gpu = device.type == "cuda"
    bandwidth = copy_bandwidth(device) if on_gpu and not asked.compile_only else None
    origin = provenance(device, command)
    steps: list[Step] = []
    num_bytes: dict[str, int] = {}
    notes: dict[str, str] = {}

    def measure(family: str) -> None:
        model = build(family, device)
        num_bytes[family] = bytes_read(model)
        if reason := _why_not(model):
            notes[family] = f"no fused layers: {reason}"
        try:
            steps.extend((_on_gpu if on_gpu else _on_cpu)(family, model, asked, reason is None))
        except Exception as error:
            notes[family] = f"{type(error).__name__}: {error}"[:400]
        del model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def save(outcome: Outcome) -> Record:
        results = FamilyResults(origin, {"repeats": asked.repeats}, bandwidth, num_bytes, notes, tuple(steps))
        record = make_record(results, outcome.complete)
        if steps:
            record.save(output)
        return record

    return take_turns([Turn(family, partial(measure, family)) for family in asked.families], reporter, save)


def bytes_read(model: PreTrainedModel) -> int:
    """Of all weights that one row's step reads: of experts the chosen ones alone."""
    config: Any = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    idle = 1 - config.num_experts_per_tok / count if count else 0.0
    experts = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 3)
    return work_of(model).weight_bytes - int(idle * experts)


def _why_not(model: PreTrainedModel) -> str | None:
    if model.device.type != "cuda":
        return choose.why_not(model)
    from forerun.models.bodies import gpu

    return gpu.why_not(model)


def _on_gpu(family: str, model: PreTrainedModel, asked: Settings, is_described: bool) -> list[Step]:
    """Fused layers before the modules: from then on the model is known as one that they do not run."""
    found = []
    if is_described:
        for rows, positions in PASSES:
            step = stepper(model, rows, positions)
            seconds = 0.0 if asked.compile_only else min(replay_times([step], asked.repeats))
            found.append(Step(family, PASS, rows, positions, seconds))
        decoder = SpeculativeDecoder(model, None, kernels="on", cache_tokens=CACHE_TOKENS)
        found += _decoding(family, FUSED, decoder.generate, model, asked)
    choose.refuse(model)
    if MODULES in asked.methods:
        decoder = SpeculativeDecoder(model, None, cache_tokens=CACHE_TOKENS)
        found += _decoding(family, MODULES, decoder.generate, model, asked)
    if TRANSFORMERS in asked.methods and not asked.compile_only:
        found += _decoding(family, TRANSFORMERS, model.generate, model, asked)
    return found


def _decoding(
    family: str, method: str, generate: Callable[..., object], model: PreTrainedModel, asked: Settings
) -> list[Step]:
    """Seconds a token of greedy plain decoding, for each number of rows."""
    found = []
    for rows in ROWS:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 30000, (rows, PROMPT), generator=generator).to(model.device)
        mask = torch.ones_like(ids)

        def call(tokens: int, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> float:
            run = partial(generate, ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            return timed(model.device, run)[1]

        call(FEW)
        if asked.compile_only:
            continue
        best = [min(call(tokens) for _ in range(asked.repeats)) for tokens in (MANY, FEW)]
        found.append(Step(family, method, rows, 1, (best[0] - best[1]) / (MANY - FEW)))
    return found


def _on_cpu(family: str, model: PreTrainedModel, asked: Settings, is_described: bool) -> list[Step]:
    """Steps of 1 and 4 tokens of one row, transformers and ours in turns."""
    subject = cpu_steps.Subject(family, model)
    methods = cpu_steps.methods(subject, CPU_GRID, Kernels.ON if is_described else Kernels.OFF)
    methods.pop(cpu_steps.MODULES)
    best: dict[tuple[str, int], float] = {}

    def keep(method: str, batch: int, tokens: int, seconds: float) -> None:
        best[method, tokens] = min(seconds, best.get((method, tokens), float("inf")))

    for _ in range(1 if asked.compile_only else 2 * asked.repeats):
        cpu_steps.sweep(methods, CPU_GRID, keep)
    names = {cpu_steps.KERNELS: FUSED, cpu_steps.TRANSFORMERS: TRANSFORMERS}
    return [Step(family, names[method], 1, tokens, seconds) for (method, tokens), seconds in best.items()]
