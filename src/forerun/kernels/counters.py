"""Counters that a kernel finds at 0 and leaves at 0: its programs count themselves, and the last puts the count back.

So no launch is needed to set them. A launch runs whole or not at all (an error on the device takes the whole
process's context with it), so no count is ever left half way. Whatever may run at the same time has counters of its
own: every stream does, and so does every call that is captured in a graph, because graphs replay on any stream. The
products of a pass, which are hundreds and want thousands, share those of their graph: they run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

ROOM = 1 << 16  # counters of a device: 256 KiB
ALIGNED = 32


class Counters:
    """One device's."""

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.device = device
        self.zeros = torch.zeros(room, dtype=torch.int32, device=device)
        self.taken = 0
        self.by_stream: dict[int, Tensor] = {}  # of each stream

    def take(self, number: int) -> Tensor:
        """[number], all 0. Where no room is left they are memory of their own, which takes a launch to set.

        All begin at addresses that Triton finds equally good, or kernels would be compiled once for each kind.
        """
        if self.taken + number > len(self.zeros):
            return torch.zeros(number, dtype=torch.int32, device=self.device)
        start, self.taken = self.taken, self.taken + -(-number // ALIGNED) * ALIGNED
        return self.zeros[start : start + number]

    def of_stream(self, stream: int, number: int) -> Tensor:
        if stream not in self.by_stream or len(self.by_stream[stream]) < number:
            self.by_stream[stream] = self.take(2 * number)
        return self.by_stream[stream][:number]


_made: dict[torch.device, Counters] = {}
_shared: dict[Any, Tensor] = {}  # by device and stream
_graph: ContextVar[dict[Any, Tensor] | None] = ContextVar("counters of the graph that is captured", default=None)


@contextmanager
def of_one_graph() -> Iterator[None]:
    """While a graph is captured: what `shared_counters` gives is that graph's own."""
    before = _graph.set({})
    try:
        yield
    finally:
        _graph.reset(before)


def shared_counters(number: int, device: torch.device) -> Tensor:
    """[number] int32, all 0, for launches of one stream or one graph; always as many."""
    counters: dict[Any, Tensor] | None = _shared
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # set to 0 by the graph, in its own memory
        counters, stream = _graph.get(), 0
    if counters is None:  # a graph of somebody else's
        return torch.zeros(number, dtype=torch.int32, device=device)
    if (device, stream) not in counters:
        counters[device, stream] = torch.zeros(number, dtype=torch.int32, device=device)
    return counters[device, stream]


def counters(number: int, device: torch.device) -> Tensor:
    """[number] int32, all 0, for one launch on the current stream."""
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        # memory made while capturing is that graph's alone, so what all share must be there before
        return _made[device].take(number) if device in _made else torch.zeros(number, dtype=torch.int32, device=device)
    if device not in _made:
        _made[device] = Counters(device)
    return _made[device].of_stream(torch.cuda.current_stream(device).cuda_stream if on_gpu else 0, number)
