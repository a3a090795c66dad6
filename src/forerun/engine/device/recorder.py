"""Work of a fixed shape, recorded once and run again and again: as a CUDA graph, or elsewhere as what it is.

Everything recorded reads and writes tensors that stay where they are, so the same round can be checked on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.engine.device.capture import Work, capture


@dataclass(slots=True)
class Recorder:
    """Captures work on a CUDA device; on any other the work itself is what is run."""

    device: torch.device
    num_recordings: int = 0
    seconds: float = 0.0  # spent on capturing, the compiling of kernels included
    _pool: Any = None  # memory that all graphs share: they run one after the other, never at once

    def record(self, work: Work, state: Sequence[Tensor]) -> Work:
        """Something to call in place of `work`; `state` is what work changes and a rehearsal must not."""
        if self.device.type != "cuda":
            return work
        started = time.perf_counter()
        self.rehearse(work, state)
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            replay: Work = capture(work, self._pool).replay
        except Exception:
            self._pool = None  # torch takes the failed capture into it for one that goes on, and refuses the next
            raise
        self.num_recordings += 1
        self.seconds += time.perf_counter() - started
        return replay

    def num_bytes(self) -> int:
        """Memory that the recordings hold together."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool))

    def rehearse(self, work: Work, state: Sequence[Tensor]) -> None:
        """Run once uncaptured: kernels are compiled and lazy buffers made while that is still allowed."""
        before = [tensor.clone() for tensor in state]
        work()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)


@dataclass(slots=True)
class Recordings:
    """Recorded work by its shape. A recording holds addresses: once what it reads has moved, it is made anew."""

    recorder: Recorder
    num_moved: int = 0  # recordings made anew because memory had moved
    _known: dict[Hashable, tuple[Hashable, Work]] = field(default_factory=dict)

    def get(self, shape: Hashable, version: Callable[[], Hashable], work: Work, state: Sequence[Tensor]) -> Work:
        """The recording of `work` for `shape`, as long as `version()` is what it was when it was made."""
        found = self._known.get(shape)
        if found is not None and found[0] == version():
            return found[1]
        self.num_moved += found is not None
        self._known.pop(shape, None)  # its memory may be used for the new one
        made = self.recorder.record(work, state)
        self._known[shape] = (version(), made)  # read again: a rehearsal may itself have made room
        return made


class Marks:
    """Moments of one round on the device's own clock, read without stopping anybody once the round is over."""

    def __init__(self, device: torch.device, clock: Callable[[], float], number: int) -> None:
        self.clock = clock
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(number)]
        self._times = [0.0] * number

    def set(self, index: int) -> None:
        if self._events:
            self._events[index].record()
        else:
            self._times[index] = self.clock()

    def wait(self) -> None:
        """Until the last mark has passed."""
        if self._events:
            self._events[-1].synchronize()

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if self._events:
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
