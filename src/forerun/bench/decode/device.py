"""What of a round is the device's own time: kernels as the profiler saw them, beside the clock on the wall."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from forerun.bench.decode.calls import Prompt
from forerun.bench.decode.methods import Decoders
from forerun.measure.rounds import SKIP
from forerun.measure.timing import busy_seconds, device_spans

ROUNDS = 8


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Of one round, the mean over several."""

    method: str
    batch: int
    wall: float  # seconds, without the profiler
    kernels: float  # seconds: the sum of the kernels' own times
    busy: float  # seconds: with the small gaps between them
    launches: float  # kernels, copies and fills

    @property
    def over_device(self) -> float:
        """What the host and the gaps it leaves add."""
        return self.wall / self.busy


def measure_device(decoders: Decoders, method: str, prompts: Sequence[Prompt], **keywords: Any) -> DeviceTime:
    """The same rounds twice, by the clock and under the profiler, whose own cost is the host's alone."""
    with _rounds(decoders, method, prompts, **keywords) as run:
        started = perf_counter()
        run()
        wall = perf_counter() - started
    with _rounds(decoders, method, prompts, **keywords) as run:
        spans = device_spans(run)
    return DeviceTime(
        method,
        len(prompts),
        wall=wall / ROUNDS,
        kernels=sum(end - start for start, end in spans) / ROUNDS,
        busy=busy_seconds(spans) / ROUNDS,
        launches=len(spans) / ROUNDS,
    )


@contextmanager
def _rounds(
    decoders: Decoders, method: str, prompts: Sequence[Prompt], **keywords: Any
) -> Iterator[Callable[[], None]]:
    """A call that has read its prompts, ready to run some rounds. The device is waited for before and after.

    A decoder that works a round ahead has then done one round before and does one more at the end: the number is right.
    """
    decoder, _ = decoders.watched(method)
    stream = decoder.stream(prompts, eos_token_id=[], **keywords)

    def run() -> None:
        for _ in range(ROUNDS):
            next(stream)
        torch.cuda.synchronize()

    try:
        for _ in range(SKIP):
            next(stream)
        torch.cuda.synchronize()
        yield run
    finally:
        stream.close()
