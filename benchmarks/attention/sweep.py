"""Other choices of the kernel's numbers, timed on the cases that matter most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from benchmarks.attention.cases import SCALE, Case, Inputs
from benchmarks.attention.results import Trial
from forerun.kernels.attention.attend import attend_ragged
from forerun.kernels.attention.shape import TUNING, AttentionTuning, choose_shape
from forerun.math.attention import Form
from forerun.measure.timing import replay_times

# (bytes of a block, stages, warps): each is compiled anew; how rows are cut is not.
BLOCKS = (
    (16384, 3, 4), (16384, 2, 4), (16384, 4, 4), (16384, 3, 2), (16384, 3, 8), (8192, 3, 2), (8192, 4, 4),
    (32768, 2, 4), (32768, 2, 8), (32768, 3, 4),
)  # fmt: skip
RESIDENTS = (1, 2, 4)


def choices() -> Iterator[AttentionTuning]:
    for block_bytes, stages, warps in BLOCKS:
        for resident in RESIDENTS:
            yield replace(TUNING, block_bytes=block_bytes, stages=stages, warps=warps, resident=resident)


def num_choices() -> int:
    return len(BLOCKS) * len(RESIDENTS)


def trials(case: Case, inputs: Inputs, repeats: int) -> Iterator[Trial]:
    """`auto` with every choice."""
    for tuning in choices():
        calls = [
            partial(attend_ragged, inputs.query, k, v, inputs.reach, SCALE, Form.AUTO, tuning)
            for k, v in zip(inputs.keys, inputs.values, strict=True)
        ]
        splits = choose_shape(inputs.query, inputs.keys[0], inputs.reach, Form.AUTO, tuning).splits
        yield Trial(case, asdict(tuning), splits, replay_times(calls, repeats))
