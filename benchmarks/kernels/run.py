"""Building the cases, timing them in turn, storing the record."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.compiling import compile_apart
from benchmarks.kernels.cases import CASES, RULES, SIGMOID, Case, Inputs, inputs
from benchmarks.kernels.results import KernelResults, Measurement, Times, times
from forerun.errors import ForerunError
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.timing import Work, copy_bandwidth, replay_times
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

IN_A_GRAPH = 20  # calls captured one behind the other, so that launching the graph does not count
REPLAYS = 30

SWEPT = (
    (Case(32000, 1, 5), ("depth", "warps", "few_warps", "last_draws", "overlap")),
    (Case(32000, 1, 5, top_k=50, top_p=0.95), ("small_top_k_warps", "overlap")),
    (Case(128256, 8, 7, top_p=0.9), ("estimate_warps", "collect_bits", "collect_warps", "resolve_warps")),
    (Case(256000, 32, 7), ("many_depth", "many_warps", "tiles", "loop_programs", "loop_warps", "overlap")),
    (Case(256000, 32, 7, dtype="bfloat16"), ("many_depth", "many_warps", "tiles", "loop_programs")),
)
VALUES: dict[str, tuple[Any, ...]] = {
    "depth": (4, 16),
    "warps": (2, 8),
    "few_warps": (2, 8),
    "last_draws": (False,),
    "overlap": (False,),
    "many_depth": (4, 16),
    "many_warps": (4, 16),
    "tiles": (4, 16),
    "loop_programs": (132, 528),
    "loop_warps": (4, 16),
    "small_top_k_warps": (4, 16),
    "estimate_warps": (4, 16),
    "collect_bits": (16,),
    "collect_warps": (1, 2, 4),
    "resolve_warps": (4, 16),
}


def check_device() -> None:
    """A GPU and Triton, or an error that says so."""
    from forerun import kernels

    if not torch.cuda.is_available():
        raise ForerunError(
            "the kernels run on a GPU, and torch finds none here; on a CPU try: python -m benchmarks.cpu_steps"
        )
    if reason := kernels.why_not_triton(torch.device("cuda")):
        raise ForerunError(f"the kernels cannot be used here: {reason}")


def run(output: Path, reporter: Reporter, command: Sequence[str], sweep: bool = False) -> Record:
    """All graphs first: once a profiler has looked, launches no longer overlap as they did."""
    check_device()
    origin = provenance("cuda", command)
    reporter.start("compiling")
    compile_apart(__name__, "compile_some", sweep)
    reporter.start("copying, to know what memory can do")
    bandwidth = copy_bandwidth()
    graphs: dict[Case, float] = {}
    measured: list[Measurement] = []
    swept: dict[str, dict[str, float]] = {}

    def replay(case: Case) -> None:
        graphs[case] = replayed(case)

    def call(case: Case) -> None:
        measured.append(measure(case, graphs[case]))

    def change(case: Case, names: Sequence[str]) -> None:
        swept[f"{case.size}: {case.name}"] = sweep_case(case, names)

    def save(outcome: TurnsOutcome) -> Record:
        return KernelResults(origin, bandwidth, tuple(measured), swept).record(outcome.complete).kept(output)

    turns = [Turn(f"{case.size}: {case.name}, replayed", partial(replay, case)) for case in CASES]
    turns += [Turn(f"{case.size}: {case.name}, with the host", partial(call, case)) for case in CASES]
    for case, names in SWEPT if sweep else ():
        turns.append(Turn(f"other tile sizes, {case.size}: {case.name}", partial(change, case, names)))
    return take_turns(turns, reporter, save)


@torch.inference_mode()
def compile_some(part: int, parts: int, sweep: bool) -> None:
    """Every `parts`-th of all kernels that will be timed."""
    from forerun.kernels.tuning import TUNING

    jobs = [(case, TUNING) for case in CASES]
    if sweep:
        jobs += [
            (case, replace(TUNING, **{name: value}))
            for case, names in SWEPT
            for name in names
            for value in VALUES[name]
        ]
    for case, tuning in jobs[part::parts]:
        tensors = inputs(case, torch.device("cuda"))
        _tried(lambda tensors=tensors, case=case, tuning=tuning: _judge(tensors, case, tuning) and 0.0)
        del tensors
        torch.cuda.empty_cache()


def _judge(tensors: Inputs, case: Case, tuning: Any) -> bool:
    from forerun.kernels.verify import verify

    verify.verify_packed(tensors.target, tensors.draft, RULES[case.rule], tensors.keys, tuning=tuning)
    return True


@torch.inference_mode()
def replayed(case: Case) -> float:
    """Microseconds of one verification in a captured graph."""
    from forerun.kernels.verify import verify

    tensors, rule = inputs(case, torch.device("cuda")), RULES[case.rule]
    return _graph_time(lambda: verify.verify_packed(tensors.target, tensors.draft, rule, tensors.keys))


@torch.inference_mode()
def measure(case: Case, graph: float) -> Measurement:
    from forerun.kernels.verify import verify

    tensors, rule = inputs(case, torch.device("cuda")), RULES[case.rule]
    ours = times(lambda: verify.verify_packed(tensors.target, tensors.draft, rule, tensors.keys), graph)
    divergence = _divergence(tensors) if case.rule == "sigmoid" else None
    theirs = _transformers(tensors) if case.batch == 1 and case.rule == "token" and _is_plain(case) else None
    torch.cuda.empty_cache()
    return Measurement(case, ours, theirs, divergence)


@torch.inference_mode()
def sweep_case(case: Case, names: Sequence[str]) -> dict[str, float]:
    """One change of the tuning at a time."""
    from forerun.kernels.tuning import TUNING
    from forerun.kernels.verify import verify

    tensors, rule = inputs(case, torch.device("cuda")), RULES[case.rule]

    def time_with(tuning: Any) -> float:
        work = partial(verify.verify_packed, tensors.target, tensors.draft, rule, tensors.keys, tuning=tuning)
        return _graph_time(work)

    seconds = {"as it is": time_with(TUNING)}
    for name in names:
        for value in VALUES[name]:
            seconds[f"{name}={value}"] = _tried(lambda n=name, v=value: time_with(replace(TUNING, **{n: v})))
    return seconds


def _graph_time(work: Work) -> float:
    """Microseconds of one call in a captured graph."""
    return 1e6 * median(replay_times([work] * IN_A_GRAPH, REPLAYS))


def _tried(work: Any) -> float:
    """Some sizes do not fit the device; the others are still worth knowing."""
    try:
        return float(work())
    except Exception:
        return float("nan")


def _is_plain(case: Case) -> bool:
    return case.top_k == 0 and case.top_p == 1 and case.dtype == "float32" and case.kept


def _transformers(tensors: Inputs) -> Times:
    from transformers.generation import utils

    function: Any = utils._speculative_sampling
    more = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(function).parameters else {}
    tokens, length = tensors.draft.tokens, tensors.draft.width
    return times(lambda: function(tokens, tensors.drafted, length, tensors.logits, **more))


def _divergence(tensors: Inputs) -> float:
    """Of a round's first token, the mean over rows."""
    from forerun.math.lossy import total_variation

    first = torch.zeros(1, dtype=torch.int64, device=tensors.logits.device).expand(len(tensors.draft.lengths))
    emitted = SIGMOID.emitted_law(tensors.target, tensors.draft.law, first)
    return float(total_variation(emitted, tensors.target.at(first)).mean())
