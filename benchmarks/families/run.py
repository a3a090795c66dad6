"""Measuring one family after the other, each by all methods before the next is built."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.cpu_steps import steps as cpu_steps
from benchmarks.families.first_call import first_calls
from benchmarks.families.report import KIND, PASSES, make_record
from benchmarks.families.results import (
    DECODE,
    FIRST_CALL,
    FIRST_CALL_AGAIN,
    FUSED,
    GENERATE,
    MODULES,
    PASS,
    PROMPT,
    STORED,
    THEIR_PROMPT,
    THEIR_STORED,
    TRANSFORMERS,
    FamilyResults,
    Step,
)
from benchmarks.families.shapes import build
from forerun import ops
from forerun.bench.decode.forward import FILLED, stepper
from forerun.bench.hardware import measure_ceilings, work_of
from forerun.config import Kernels
from forerun.decoder import SpeculativeDecoder
from forerun.errors import ForerunWarning
from forerun.kernels import why_not_numba
from forerun.kernels.cpu import choice
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading.load import STORED as AS_STORED
from forerun.loading.load import LoadRequest, quiet
from forerun.math.blocks import format_named
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record, load
from forerun.measure.timing import copy_bandwidth, replay_times, timed
from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from forerun.models.bodies import choose

ROWS = (1, 8)
BEFORE, FEW, MANY = 64, 8, 104  # tokens; the difference of two calls leaves out prompt and recording
CPU_FEW, CPU_MANY = 4, 20
PAIRS = 5  # of such calls on a GPU at least, where a few launches more or less are what one row and eight differ by
CACHE_TOKENS = 2048  # of all rows
CONTEXT = 2048
CPU_GRID = cpu_steps.Grid(batches=(1,), tokens=(1, 4), past=256)


Note = Callable[[str], None]  # for the record, of the family that is measured


@dataclass(frozen=True, slots=True)
class Settings:
    families: tuple[str, ...]
    repeats: int = 3
    methods: tuple[str, ...] = (MODULES, TRANSFORMERS)  # beside fused layers
    compile_only: bool = False  # run everything once and time nothing: kernels are compiled and kept on disk
    prompts: tuple[int, ...] = ()  # tokens: time these in the place of steps
    first_calls: bool = False  # time these in the place of steps
    adds: bool = False  # to the record that is there, of other families


def run(asked: Settings, device: torch.device, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    """A family that fails leaves a note, and the others are measured."""
    on_gpu = device.type == "cuda"
    bandwidth = None if asked.compile_only or asked.first_calls else _bandwidth(device)
    origin = provenance(device, command)
    settings: dict[str, Any] = {"repeats": asked.repeats}
    if not (on_gpu or asked.compile_only or asked.prompts or asked.first_calls):
        settings["keeps_bfloat16"] = _keeps_halves()
    steps, notes, known = _kept(output) if asked.adds and output.exists() else ([], {}, None)
    if known is not None and (bandwidth is None or not on_gpu):
        bandwidth = max(bandwidth or known, known)

    def measured(family: str) -> list[Step]:
        if asked.first_calls:
            before, again = first_calls(family, device)
            return [Step(family, FIRST_CALL, 1, 1, before), Step(family, FIRST_CALL_AGAIN, 1, 1, again)]
        model = build(family, device, max((CONTEXT, *(length + 64 for length in asked.prompts))))
        if reason := _why_not(model):
            notes[family] = f"no fused layers: {reason}"
        how = _prompts if asked.prompts else _on_gpu if on_gpu else _on_cpu
        return how(family, model, asked, reason is None, partial(notes.__setitem__, family))

    def measure(family: str) -> None:
        notes.pop(family, None)
        try:
            new = measured(family)
            steps[:] = [step for step in steps if step.family != family or not is_anew(step, asked, on_gpu)] + new
        except Exception as error:
            notes[family] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def save(outcome: TurnsOutcome) -> Record:
        read = bandwidth if on_gpu else fastest_read(bandwidth, steps)
        results = FamilyResults(origin, settings, read, notes, tuple(steps))
        return make_record(results, outcome.complete).kept(output)

    return take_turns([Turn(family, partial(measure, family)) for family in asked.families], reporter, save)


def _bandwidth(device: torch.device) -> float:
    return copy_bandwidth(device) if device.type == "cuda" else measure_ceilings(device, torch.float32).linear


def _keeps_halves() -> bool:
    """Whether this machine keeps bfloat16 narrow by its own choice."""
    return why_not_numba() is None and choice.narrow_pays(format_named("BF16"))


def fastest_read(bandwidth: float | None, steps: Sequence[Step]) -> float | None:
    """Bytes a second: a plain read may be timed in a busy moment, and no floor lies above a step that was seen."""
    if bandwidth is None:
        return None
    return max((bandwidth, *(step.num_bytes / step.seconds for step in steps if step.method in (FUSED, STORED))))


def missing(listed: Iterable[str], output: Path | None, prompts: Sequence[int] = ()) -> list[str]:
    """Families that a record lacks: a run that was interrupted goes on there."""
    if output is None or not output.exists():
        return list(listed)
    old = load(output, KIND)
    there = {(row["family"], row["positions"]) for row in old.rows if not prompts or row["method"] == THEIR_PROMPT}
    return [family for family in listed if any((family, asked) not in there for asked in prompts or (1,))]


def _kept(output: Path) -> tuple[list[Step], dict[str, str], float | None]:
    """Of the record that is there: its steps and notes, and how fast memory was read."""
    old = load(output, KIND)
    return [Step(**row) for row in old.rows], dict(old.details["notes"]), old.details["bandwidth"]


def is_anew(step: Step, asked: Settings, on_gpu: bool) -> bool:
    """Whether a family's measurement replaces this step of an older one. An interrupted one replaces nothing."""
    if step.method in (PROMPT, THEIR_PROMPT):
        return step.positions in asked.prompts
    if step.method in (FIRST_CALL, FIRST_CALL_AGAIN):
        return asked.first_calls
    if asked.prompts or asked.first_calls:
        return False
    return not on_gpu or step.method in (PASS, FUSED, *asked.methods)


def bytes_read(model: PreTrainedModel, step: Callable[[], object]) -> int:
    """Of all weights that a pass reads: of experts those that one of its rows has chosen, each once."""
    read = work_of(model).weight_bytes
    layers = _experts_chosen(step)
    if not layers:
        return read
    idle = 1 - sum(chosen / there for chosen, there in layers) / len(layers)
    return read - int(idle * sum(weight.nbytes for weight in model.parameters() if weight.ndim == 3))


def _experts_chosen(step: Callable[[], object]) -> list[tuple[int, int]]:
    """By layer: how many experts are chosen by any row, and how many there are."""
    counts, run_experts = [], ops.run_experts

    def counted(x: Any, router: Any, route: Any, weights: Any, library: Any) -> Any:
        _, chosen = route(x)
        counts.append((len(chosen.unique()), len(weights.first)))
        return run_experts(x, router, route, weights, library)

    with patch.object(ops, "run_experts", counted):
        step()
    return counts


def _why_not(model: PreTrainedModel) -> str | None:
    if model.device.type != "cuda":
        return choose.why_not(model)
    from forerun.models.bodies import gpu

    return gpu.why_not(model)


def _decoder(model: PreTrainedModel, use: str, note: Note, **options: Any) -> SpeculativeDecoder:
    """A plain one; where fused layers are asked for and not used, as where random weights fail the self-check, the
    record says so and why."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decoder = SpeculativeDecoder(model, None, kernels=use, **options)
    for each in told:
        warnings.warn(each.message, stacklevel=2)
    if use == "on" and not decoder.engine.target.is_fused:
        reasons = [str(each.message) for each in told if issubclass(each.category, ForerunWarning)]
        note(f"fused layers are described and were not used: {'; '.join(reasons) or 'no reason was told'}"[:400])
    return decoder


def _on_gpu(family: str, model: PreTrainedModel, asked: Settings, is_described: bool, note: Note) -> list[Step]:
    """Fused layers before the modules: from then on the model is known as one that they do not run."""
    steps = []
    if is_described:
        for rows, positions in PASSES:
            step = stepper(model, rows, positions)
            seconds = 0.0 if asked.compile_only else min(replay_times([step], asked.repeats))
            keys = rows * FILLED * work_of(model).bytes_per_key
            steps.append(Step(family, PASS, rows, positions, seconds, bytes_read(model, step), keys))
        decoder = _decoder(model, "on", note, cache_tokens=CACHE_TOKENS)
        if decoder.engine.target.is_fused:
            steps += _decoding(family, FUSED, decoder.generate, model, asked)
    choose.refuse(model)
    if MODULES in asked.methods:
        decoder = SpeculativeDecoder(model, None, cache_tokens=CACHE_TOKENS)
        steps += _decoding(family, MODULES, decoder.generate, model, asked)
    if TRANSFORMERS in asked.methods and not asked.compile_only:
        steps += _decoding(family, TRANSFORMERS, model.generate, model, asked)
    return steps


def _prompts(family: str, model: PreTrainedModel, asked: Settings, is_described: bool, note: Note) -> list[Step]:
    """Seconds of a call that reads a prompt and gives one token, by turns, each time in the other order."""
    steps = []
    use = "on" if model.device.type == "cuda" else "auto"  # on a CPU long prompts may be the modules', as for users
    decoder = _decoder(model, use, note if is_described else lambda _: None, cache_tokens=2 * max(asked.prompts))
    for length in asked.prompts:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 30000, (1, length), generator=generator).to(model.device)
        mask, best = torch.ones_like(ids), {PROMPT: float("inf"), THEIR_PROMPT: float("inf")}
        calls = {PROMPT: decoder.generate, THEIR_PROMPT: model.generate}
        for turn in range(1 + asked.repeats):  # the first compiles
            for method, generate in sorted(calls.items(), reverse=bool(turn % 2)):
                ids[0, 0] += 1  # no beginning that anybody keeps
                run = partial(generate, ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
                best[method] = min(best[method], timed(model.device, run)[1])
        steps += [Step(family, method, 1, length, seconds) for method, seconds in best.items()]
    return steps


def _decoding(
    family: str,
    method: str,
    generate: Callable[..., object],
    model: PreTrainedModel,
    asked: Settings,
    batches: tuple[int, ...] = ROWS,
    few: int = FEW,
    many: int = MANY,
) -> list[Step]:
    """Seconds a token of greedy plain decoding, for each number of rows: of pairs of a long and a short call, each
    time in the other order, the median of their differences."""
    steps, pairs = [], max(asked.repeats, PAIRS if model.device.type == "cuda" else 1)
    for rows in batches:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 30000, (rows, BEFORE), generator=generator).to(model.device)
        mask = torch.ones_like(ids)

        def call(tokens: int, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> float:
            run = partial(generate, ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            return timed(model.device, run)[1]

        for tokens in (few, many):  # compiled and recorded
            call(tokens)
        if asked.compile_only:
            continue
        differences = []
        for index in range(pairs):
            order = (many, few) if index % 2 else (few, many)
            seconds = {tokens: call(tokens) for tokens in order}
            differences.append(seconds[many] - seconds[few])
        steps.append(Step(family, method, rows, 1, median(differences) / (many - few), pairs=pairs))
    return steps


class StoredModels(NamedTuple):
    """What users have of one file of bfloat16."""

    wide: PreTrainedModel  # all of it float32
    kept: PreTrainedModel | None  # as `forerun.load` keeps it; None where that is float32 as well
    theirs: PreTrainedModel  # as transformers loads it when it is told nothing


@contextmanager
def stored_models(model: PreTrainedModel) -> Iterator[StoredModels]:
    """The same random weights loaded three times; what is kept narrow lies in the memory of the file meanwhile.

    It is kept narrow where this machine would not choose it, too, as layers are fused that it would not fuse.
    """
    attention = model.config._attn_implementation
    narrow = patch.object(choice, "narrow_pays", lambda stored: True)
    with TemporaryDirectory(prefix="families-") as place, quiet(), narrow:
        model.to(torch.bfloat16).save_pretrained(place)
        wide, kept = (
            LoadRequest.of(place, dtype, "cpu", offline=True).model("a causal model", lambda _: AutoModelForCausalLM)
            for dtype in ("float32", AS_STORED)
        )
        theirs = AutoModelForCausalLM.from_pretrained(place).eval()
        assert theirs.dtype == torch.bfloat16
        for loaded in (wide, kept, theirs):
            loaded.set_attn_implementation(attention)
        is_narrow = any(isinstance(weight, NarrowWeight) for weight in kept.parameters())
        yield StoredModels(wide, kept if is_narrow else None, theirs)


def _on_cpu(family: str, model: PreTrainedModel, asked: Settings, is_described: bool, note: Note) -> list[Step]:
    """Steps of 1 and 4 tokens of one row, transformers and ours in turns; then decoding as users call it."""
    with stored_models(model) as models:
        return _stored_steps(family, models, asked, is_described) + _calls(
            family, models.wide, asked, is_described, note
        )


def _stored_steps(family: str, models: StoredModels, asked: Settings, is_described: bool) -> list[Step]:
    narrow = {STORED: models.kept} if models.kept is not None and is_described else {}
    subject = cpu_steps.Subject(family, models.wide, narrow=narrow)
    methods = cpu_steps.methods(subject, CPU_GRID, Kernels.ON if is_described else Kernels.OFF)
    methods.pop(cpu_steps.MODULES)
    inputs = cpu_steps.Inputs(subject, CPU_GRID)
    methods[THEIR_STORED] = cpu_steps.Transformers(replace(subject, model=models.theirs), inputs)
    best: dict[tuple[str, int], float] = {}

    def keep(method: str, batch: int, tokens: int, seconds: float) -> None:
        best[method, tokens] = min(seconds, best.get((method, tokens), float("inf")))

    for _ in range(1 if asked.compile_only else 2 * asked.repeats):
        cpu_steps.sweep(methods, CPU_GRID, keep)
    names = {cpu_steps.KERNELS: FUSED, cpu_steps.TRANSFORMERS: TRANSFORMERS}
    read = {FUSED: work_of(models.wide), THEIR_STORED: work_of(models.theirs)}
    read |= {TRANSFORMERS: read[FUSED]} | {method: work_of(model) for method, model in narrow.items()}
    timed_steps = ((names.get(method, method), tokens, seconds) for (method, tokens), seconds in best.items())
    return [Step(family, name, 1, tokens, seconds, read[name].weight_bytes) for name, tokens, seconds in timed_steps]


def _calls(family: str, model: PreTrainedModel, asked: Settings, is_described: bool, note: Note) -> list[Step]:
    steps = []
    decode = _decoder(model, "on" if is_described else "off", note).generate
    for method, generate in ((DECODE, decode), (GENERATE, model.generate)):
        steps += _decoding(family, method, generate, model, asked, (1,), CPU_FEW, CPU_MANY)
    return steps
