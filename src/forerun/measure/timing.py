"""Clocks: whole calls by the wall clock, CUDA events, replays of a captured graph, and kernels under the profiler.

All of them give seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from forerun.errors import ForerunError

T = TypeVar("T")
Work = Callable[[], object]

SHORTEST_STRETCH = 2e-3  # seconds of one timed stretch of replays: events tick in half microseconds
COPIED_BYTES = 1 << 30
SMALL_GAP = 3e-6
"""Between kernels of one graph, or queued one behind the other, there is always a microsecond or two: the device's."""


def need_gpu() -> torch.device:
    """The GPU to measure on."""
    if not torch.cuda.is_available():
        raise ForerunError(
            "this measures kernels for a CUDA GPU, and torch finds none here; run it where there is one "
            "(`forerun doctor` says what torch finds)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, call: Callable[[], T]) -> tuple[T, float]:
    """What a call gives, and its seconds by the wall clock; the device is waited for on both sides."""
    synchronize(device)
    started = perf_counter()
    out = call()
    synchronize(device)
    return out, perf_counter() - started


def wall_times(work: Work, repeats: int, device: torch.device | None = None, warm_up: int = 1) -> tuple[float, ...]:
    """Seconds of each of `repeats` calls by the wall clock, after some that may compile or choose an algorithm."""
    place = device or torch.device("cpu")
    for _ in range(warm_up):
        work()
    return tuple(timed(place, work)[1] for _ in range(repeats))


def event_times(work: Work, repeats: int) -> tuple[float, ...]:
    """Seconds of each of `repeats` calls between two CUDA events, after one to warm up."""
    work()
    return tuple(_between_events(work) for _ in range(repeats))


def replay_times(calls: Sequence[Work], repeats: int) -> tuple[float, ...]:
    """Seconds of one call, for each of `repeats` stretches of replays of a graph that holds all `calls`."""
    graph = capture(calls)
    once = _between_events(graph.replay)
    replays = max(1, int(SHORTEST_STRETCH / max(once, 1e-6)))

    def stretch() -> None:
        for _ in range(replays):
            graph.replay()

    return tuple(_between_events(stretch) / (replays * len(calls)) for _ in range(repeats))


def capture(calls: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, one behind the other, replayed once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and lets libraries make their workspaces
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def device_spans(work: Work) -> list[tuple[float, float]]:
    """Start and end, in seconds, of every kernel, copy and fill that `work` ran on the GPU, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    return [(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]


def busy_seconds(spans: Iterable[tuple[float, float]], gap: float = SMALL_GAP) -> float:
    """Seconds covered by spans, overlaps once and small gaps as if they were covered."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        if start - until > gap:
            total, until = total + end - start, end
        elif end > until:
            total, until = total + end - until, end
    return total


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """Bytes a second, read and written, of the best of several large copies; in a graph a slower engine copies."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / min(event_times(lambda: target.copy_(source), 10))


def linear_bandwidth(device: torch.device | str = "cuda", repeats: int = 5) -> float:
    """Bytes a second of weights read by a product with one row: what a forward pass of few rows can reach."""
    weight = torch.randn(16384, 65536, dtype=torch.bfloat16, device=device)  # far larger than any cache of the device
    row = torch.randn(1, weight.shape[1], dtype=torch.bfloat16, device=device)
    product = torch.nn.functional.linear
    return weight.nbytes / median(replay_times([lambda: product(row, weight)] * 2, repeats))


def _between_events(work: Work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
