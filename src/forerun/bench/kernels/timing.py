"""Times on a GPU: of a captured graph, of the kernels alone, and with the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

IN_A_GRAPH = 20  # calls captured one behind the other, so that launching the graph does not count
REPLAYS = 30
WARM_UP = 5  # replays before: an idle device takes a while to reach its speed
CALLS = 20
COPIED = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call."""

    kernels: float  # the sum of the kernels' own times
    launches: float
    wall: float  # until the host knows that it is done
    graph: float | None = None  # replayed from a CUDA graph; None where it cannot be captured


def times(work: Callable[[], object], graph: float | None = None) -> Times:
    """`graph` is what `graph_time` found, before anything was profiled in this process."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    kernels, launches = _profiled(work)
    return Times(kernels, launches, _wall(work), graph)


def graph_time(work: Callable[[], object]) -> float:
    """The median over replays; everything is compiled before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            work()
    for _ in range(WARM_UP):
        graph.replay()
    return _events(graph.replay, REPLAYS) / IN_A_GRAPH


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of the best of several large copies; in a graph a slower engine copies."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return max(2e6 * COPIED / _events(lambda: target.copy_(source), 1) for _ in range(10))


def _events(work: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end))
    return float(median(found))


def _wall(work: Callable[[], object]) -> float:
    found = []
    for _ in range(CALLS):
        started = perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(1e6 * (perf_counter() - started))
    return median(found)


def _profiled(work: Callable[[], object]) -> tuple[float, float]:
    """Kernels, copies and fills are all launches."""
    calls = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    own: list[Any] = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    return sum(event.self_device_time_total for event in own) / calls, len(own) / calls
