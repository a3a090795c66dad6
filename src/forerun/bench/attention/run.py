"""Making inputs, measuring, storing: the whole of `forerun bench attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun import kernels
from forerun.bench.attention.cases import TITLES, Case, Inputs, calls
from forerun.bench.attention.record import AttentionRecord, Timing, Trial
from forerun.bench.attention.report import summary
from forerun.bench.attention.timing import need_gpu, seconds_a_call
from forerun.bench.kernels.timing import copy_bandwidth
from forerun.bench.listening import Listener
from forerun.bench.records import provenance, write
from forerun.errors import ForerunError


@dataclass
class Found:
    """What has been measured so far."""

    timings: list[Timing] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)


def carry_out(
    cases: Sequence[Case], swept: Sequence[Case], repeats: int, output: Path, listener: Listener, command: Sequence[str]
) -> AttentionRecord:
    """Ctrl-C ends it; what was measured until then is stored. `swept` cases are also tried with other tunings."""
    device = need_gpu()
    if reason := kernels.triton_missing(device.type):
        raise ForerunError(f"there is nothing to measure: {reason}")
    listener.starting("what a copy reads and writes")
    bandwidth, found, complete = copy_bandwidth(), Found(), True
    try:
        _measure(cases, swept, repeats, device, listener, found)
    except KeyboardInterrupt:
        complete = False
    record = AttentionRecord(
        provenance=provenance(device, command),
        settings={"repeats": repeats},
        titles={str(way): title for way, title in TITLES.items()},
        copy_bytes_per_second=bandwidth,
        complete=complete,
        measurements=tuple(found.timings),
        trials=tuple(found.trials),
    )
    if record.measurements or record.trials:
        write(record, output, summary(record))
    return record


def _measure(
    cases: Sequence[Case],
    swept: Sequence[Case],
    repeats: int,
    device: torch.device,
    listener: Listener,
    found: Found,
) -> None:
    from forerun.bench.attention.sweep import num_choices, trials

    listener.starting("attention", total=len(cases) * len(TITLES) + len(swept) * num_choices())
    torch.manual_seed(0)
    for case in cases:
        listener.starting(case.title)
        inputs = Inputs.of(case, device)
        _ways(case, inputs, repeats, listener, found.timings)
    for case in swept:
        listener.starting(f"other choices: {case.title}")
        inputs = Inputs.of(case, device)
        found.trials.extend(trials(case, inputs, repeats, listener.advance))


def _ways(case: Case, inputs: Inputs, repeats: int, listener: Listener, timings: list[Timing]) -> None:
    expected: torch.Tensor | None = None
    for way in TITLES:
        own = calls(case, inputs, way)
        made = own[0]().float()
        expected = made if expected is None else expected
        deviation = float((made - expected).abs().max())
        timings.append(Timing(case, str(way), seconds_a_call(own, repeats), deviation))
        listener.advance()
