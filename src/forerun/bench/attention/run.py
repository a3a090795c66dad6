"""Making inputs, measuring, storing: the whole of `forerun bench attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun import kernels
from forerun.bench.attention.cases import TITLES, Case, Inputs, calls
from forerun.bench.attention.compiling import compile_all
from forerun.bench.attention.record import AttentionRecord, Timing, Trial
from forerun.bench.attention.report import summary
from forerun.bench.attention.timing import need_gpu, seconds_a_call
from forerun.bench.kernels.timing import copy_bandwidth
from forerun.bench.listening import Listener
from forerun.bench.records import write
from forerun.errors import ForerunError
from forerun.measure.provenance import Provenance, provenance


@dataclass
class Found:
    """What has been measured so far."""

    origin: Provenance
    output: Path
    repeats: int
    bandwidth: float
    timings: list[Timing] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def store(self, complete: bool = False) -> AttentionRecord:
        """After every case: whoever is stopped keeps what there is."""
        record = AttentionRecord(
            provenance=self.origin,
            settings={"repeats": self.repeats},
            titles={str(way): title for way, title in TITLES.items()},
            copy_bytes_per_second=self.bandwidth,
            complete=complete,
            measurements=tuple(self.timings),
            trials=tuple(self.trials),
        )
        if record.measurements or record.trials:
            write(record, self.output, summary(record))
        return record


def carry_out(
    cases: Sequence[Case], swept: Sequence[Case], repeats: int, output: Path, listener: Listener, command: Sequence[str]
) -> AttentionRecord:
    """Ctrl-C ends it; what was measured until then is stored. `swept` cases are also tried with other tunings."""
    device = need_gpu()
    if reason := kernels.why_not_triton(device.type):
        raise ForerunError(f"there is nothing to measure: {reason}")
    origin = provenance(device, command)
    listener.starting("compiling")
    compile_all(cases)
    listener.starting("what a copy reads and writes")
    found = Found(origin, output, repeats, copy_bandwidth())
    try:
        _measure(cases, swept, device, listener, found)
    except KeyboardInterrupt:
        return found.store()
    return found.store(complete=True)


def _measure(
    cases: Sequence[Case], swept: Sequence[Case], device: torch.device, listener: Listener, found: Found
) -> None:
    from forerun.bench.attention.sweep import num_choices, trials

    listener.starting("attention", total=len(cases) * len(TITLES) + len(swept) * num_choices())
    torch.manual_seed(0)
    for case in cases:
        listener.starting(case.title)
        inputs = Inputs.of(case, device)
        _ways(case, inputs, listener, found)
        found.store()
    for case in swept:
        listener.starting(f"other choices: {case.title}")
        inputs = Inputs.of(case, device)
        found.trials.extend(trials(case, inputs, found.repeats, listener.advance))
        found.store()


def _ways(case: Case, inputs: Inputs, listener: Listener, found: Found) -> None:
    expected: torch.Tensor | None = None
    for way in TITLES:
        own = calls(case, inputs, way)
        made = own[0]().float()
        expected = made if expected is None else expected
        deviation = float((made - expected).abs().max())
        found.timings.append(Timing(case, str(way), seconds_a_call(own, found.repeats), deviation))
        listener.advance()
