"""What of a round is the device's own time: kernels as the profiler saw them, beside the clock on the wall."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from forerun.bench.decode.calls import Prompt
from forerun.bench.decode.methods import Decoders
from forerun.measure.rounds import SKIP, padded

ROUNDS = 8
SMALL_GAP = 3e-6
"""Between kernels of one graph, or queued one behind the other, there is always a microsecond or two: the device's."""


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
    with (
        _rounds(decoders, method, prompts, **keywords) as run,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        run()
    spans = [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in _on_device(profile.events())]
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
    stream = decoder.stream(*padded(prompts, decoder.target.device), eos_token_id=[], **keywords)

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


def busy_seconds(spans: Iterable[tuple[float, float]], gap: float = SMALL_GAP) -> float:
    """Seconds covered by spans, overlaps once and small gaps as if they were covered."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        if start - until > gap:
            total, until = total + end - start, end
        elif end > until:
            total, until = total + end - until, end
    return total


def _on_device(events: Any) -> list[Any]:
    return [event for event in events if "CUDA" in str(event.device_type)]
