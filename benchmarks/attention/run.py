"""Making inputs, measuring, storing after every case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.attention.cases import TITLES, Case, Inputs, calls
from benchmarks.attention.compiling import compile_all
from benchmarks.attention.report import make_record
from benchmarks.attention.results import AttentionResults, Timing, Trial
from benchmarks.attention.sweep import num_choices, trials
from forerun import kernels
from forerun.errors import ForerunError
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.timing import copy_bandwidth, need_gpu, replay_times
from forerun.measure.turns import Turn, TurnsOutcome, take_turns


def run(
    cases: Sequence[Case], swept: Sequence[Case], repeats: int, output: Path, reporter: Reporter, command: Sequence[str]
) -> Record:
    """`swept` cases are also tried with other tunings."""
    device = need_gpu()
    if reason := kernels.why_not_triton(device):
        raise ForerunError(f"there is nothing to measure: {reason}")
    origin = provenance(device, command)
    reporter.start("compiling")
    compile_all(cases)
    reporter.start("what a copy reads and writes")
    bandwidth = copy_bandwidth(device)
    timings: list[Timing] = []
    tried: list[Trial] = []
    torch.manual_seed(0)

    def sweep(case: Case) -> None:
        tried.extend(trials(case, Inputs.of(case, device), repeats))

    def save(outcome: TurnsOutcome) -> Record:
        titles = {str(method): title for method, title in TITLES.items()}
        results = AttentionResults(origin, repeats, titles, bandwidth, tuple(timings), tuple(tried))
        record = make_record(results, outcome.complete)
        if timings or tried:
            record.save(output)
        return record

    turns = [Turn(case.title, partial(time_case, case, device, repeats, timings), cost=len(TITLES)) for case in cases]
    turns += [Turn(f"other choices: {case.title}", partial(sweep, case), cost=num_choices()) for case in swept]
    return take_turns(turns, reporter, save)


def time_case(case: Case, device: torch.device, repeats: int, timings: list[Timing]) -> None:
    """Every method in turn over the same keys; the first is what the others' results are compared with."""
    inputs = Inputs.of(case, device)
    expected: torch.Tensor | None = None
    for method in TITLES:
        launches = calls(case, inputs, method)
        attended = launches[0]().float()
        expected = attended if expected is None else expected
        deviation = float((attended - expected).abs().max())
        timings.append(Timing(case, str(method), replay_times(launches, repeats), deviation))
