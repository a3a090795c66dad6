"""Captures of CUDA graphs: one at a time in a process, as torch demands, and each on a stream of its own device.

Left to itself torch captures everything on one stream of whichever device was current at the first capture, and
entering that stream makes its device the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch

one_at_a_time = RLock()  # decoders in threads of their own may meet their first rounds together


class Busy(Exception):
    """Another thread went on capturing for as long as one was ready to wait."""


@contextmanager
def capturing(graph: Any, pool: Any = None, patience: float = -1) -> Iterator[None]:
    """Capture into a `torch.cuda.CUDAGraph` what is launched on the current device, once nobody else captures.

    Whoever is in the middle of a pass must wait with `patience` (seconds; -1 is for ever): what another thread captures
    may be a pass of the same model, which waits for this one's end.
    """
    if not one_at_a_time.acquire(timeout=patience):
        raise Busy(f"another capture took more than {patience} seconds")
    try:
        stream = capture_stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        one_at_a_time.release()


@cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """The same for all captures on a device: graphs that share a pool of memory must share it."""
    return torch.cuda.Stream(index)
