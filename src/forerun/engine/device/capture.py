"""Capturing a CUDA graph so that a capture that fails leaves torch as it was.

torch ends a capture on the device before it tidies up after it, so an error at the end leaves three things behind: the
capture's stream is the current one, the allocator goes on waiting for the capture's end (and frees nothing that another
stream has used), and the random generator refuses every draw outside of a capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from forerun.kernels.captures import capturing, one_at_a_time
from forerun.kernels.counters import of_one_graph

Work = Callable[[], None]

_broken: list[Any] = []  # torch's allocators keep pointers to graphs whose capture failed: such a graph has to live on


def capture(work: Work, pool: Any) -> Any:
    """A `torch.cuda.CUDAGraph` of `work` on the current device, its memory taken from `pool`."""
    graph: Any = torch.cuda.CUDAGraph()
    with one_at_a_time:  # what is done after a failure belongs to the capture
        try:
            # The third context brings the caller's stream back, which a failing capture forgets.
            with (
                no_garbage_collected(),
                of_one_graph(),
                torch.cuda.stream(torch.cuda.current_stream()),
                capturing(graph, pool),
            ):
                work()
        except Exception:
            _broken.append(graph)
            _tidy(pool)
            raise
    return graph


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Another decoder's graphs that the collector freed in the middle of a capture would invalidate it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tidy(pool: Any) -> None:
    torch.cuda.synchronize()
    with suppress(RuntimeError):  # the capture came to its end: then this was done, and what failed was the work alone
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    # The end of any capture is what makes the generator draw again, from where it stood.
    with capturing(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
