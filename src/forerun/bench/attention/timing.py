"""Seconds on the device alone: calls are captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forerun.errors import ForerunError

LEAST_SECONDS = 2e-3  # of one timed stretch: events tick in half microseconds


def need_gpu() -> torch.device:
    """The GPU to measure on."""
    if not torch.cuda.is_available():
        raise ForerunError(
            "this measures kernels for a CUDA GPU, and torch finds none here; run it where there is one "
            "(`forerun doctor` says what torch finds, `forerun bench cpu` measures on a CPU)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def seconds_a_call(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, ...]:
    """Seconds of one call, for each of `repeats` stretches of replays."""
    graph = _captured(calls)
    once = _timed(graph, 1)
    replays = max(1, int(LEAST_SECONDS / max(once, 1e-6)))
    return tuple(_timed(graph, replays) / (replays * len(calls)) for _ in range(repeats))


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
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


def _timed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
