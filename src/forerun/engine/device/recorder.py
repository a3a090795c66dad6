"""Work of a fixed shape, recorded once and run again and again: as a CUDA graph, or elsewhere as what it is.

Everything recorded reads and writes tensors that stay where they are, so the same round can be checked on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.engine.device.capture import Work, capture
from forerun.errors import kind_and_line
from forerun.models.bodies.rehearsal import rehearsal

DOUBLING = 128  # rows up to which scratch memory doubles; beyond that memory is dearer than recording anew


@dataclass(slots=True)
class Recorder:
    """Captures work on a CUDA device; on any other the work itself is what is run."""

    device: torch.device
    # Where several ranks record the same work: raises on all of them once one has told of a problem (`Ranks.agree`).
    agree: Callable[[str | None], None] | None = None
    num_recordings: int = 0
    seconds: float = 0.0  # spent on capturing, the compiling of kernels included
    # Memory that all graphs share: they run one after the other, never at once. The last pool is the one in use; the
    # others hold graphs from before a capture that failed.
    _pools: list[Any] = field(default_factory=list)
    _is_usable: bool = False  # whether the last pool is

    def record(self, work: Work, state: Sequence[Tensor], whole: bool = False) -> Work:
        """Something to call in place of `work`; `state` is what work changes and a rehearsal must not.

        `whole`: what a rehearsal leaves beside `state` must be what the work leaves.
        """
        if not self.captures:
            return work
        started = time.perf_counter()
        if self.agree is None:
            replay = self._record_alone(work, state, whole)
        else:
            replay = self._record_together(work, state, self.agree)
        self.num_recordings += 1
        self.seconds += time.perf_counter() - started
        return replay

    @property
    def captures(self) -> bool:
        return self.device.type == "cuda"

    def _record_alone(self, work: Work, state: Sequence[Tensor], whole: bool) -> Work:
        self.rehearse(work, state, whole)
        try:
            return self._captured(work)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # perhaps of a layer that launches what no layer of its kind has
            self.rehearse(work, state, whole=True)
            return self._captured(work)

    def _record_together(self, work: Work, state: Sequence[Tensor], agree: Callable[[str | None], None]) -> Work:
        """All ranks rehearse all of it; then all of them have captured it or none has.

        A rehearsal sums up over the ranks. One that fails leaves the others within a sum, as any pass does that fails:
        there is nothing left to agree on. Nobody captures twice: a rank that did would wait for ranks that do not.
        """
        self.rehearse(work, state, whole=True)
        agree(None)  # all have come to its end: nobody waits below for a rank that has not
        self._synchronize()
        captured: list[Work] = []
        agree(_problem(lambda: captured.append(self._captured(work))))
        return captured[0]

    def on_all_ranks(self, step: Work) -> None:
        """A step in which no rank waits for another: where it fails on one, `agree` raises on all of them."""
        if self.agree is None:
            step()
        else:
            self.agree(_problem(step))

    def _synchronize(self) -> None:
        """What fails on the device before this is told by this."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _captured(self, work: Work) -> Work:
        self._synchronize()
        if not self._is_usable:
            self._pools.append(torch.cuda.graph_pool_handle())
        self._is_usable = False  # after an error torch takes the capture for one that goes on, and refuses the next
        replay: Work = capture(work, self._pools[-1]).replay
        self._is_usable = True
        return replay

    def num_bytes(self) -> int:
        """Memory that the recordings hold together."""
        if not self._pools:
            return 0
        segments, pools = torch.cuda.memory_snapshot(), set(map(tuple, self._pools))
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) in pools)

    def rehearse(self, work: Work, state: Sequence[Tensor], whole: bool = False) -> None:
        """Run once uncaptured, a layer of each kind or the whole of it.

        Kernels are compiled and lazy buffers made while that is still allowed.
        """
        before = [tensor.clone() for tensor in state]
        with nullcontext() if whole else rehearsal():
            work()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)


@dataclass(slots=True)
class Recordings:
    """Recorded work by its shape. A recording holds addresses: once what it reads has moved, it is made anew."""

    recorder: Recorder
    num_moved: int = 0  # recordings made anew because memory had moved
    _known: dict[Hashable, tuple[Hashable, Work]] = field(default_factory=dict)

    def has(self, shape: Hashable, version: Hashable) -> bool:
        """Whether `get` would record nothing."""
        return shape in self._known and self._known[shape][0] == version

    def forget(self, shape: Hashable) -> None:
        """Let `get` record it anew."""
        self._known.pop(shape, None)

    def get(
        self,
        shape: Hashable,
        version: Callable[[], Hashable],
        work: Work,
        state: Sequence[Tensor],
        whole: bool = False,
    ) -> Work:
        """The recording of `work` for `shape`, as long as `version()` is what it was when it was made.

        The rest is as in `Recorder.record`.
        """
        known = self._known.get(shape)
        if known is not None and known[0] == version():
            return known[1]
        self.num_moved += known is not None
        self._known.pop(shape, None)  # its memory may be used for the new one
        recording = self.recorder.record(work, state, whole)
        self._known[shape] = (version(), recording)  # read again: a rehearsal may itself have made room
        return recording


def _problem(step: Work) -> str | None:
    """What is wrong with a step, in words that other ranks can be told."""
    try:
        step()
    except Exception as error:
        return kind_and_line(error)
    return None


class Scratch:
    """Rows of logits or hidden states that one recording leaves for the next: one buffer for all shapes.

    It is as large as the largest shape needs and has the model's dtype, so it is allocated when the first rows exist.
    """

    def __init__(self) -> None:
        self.rows = torch.empty(0, 0)  # [N, V]
        self.version = 0

    def reserve(self, like: Tensor, number: int) -> None:
        """Memory for `number` rows like those of `like` [n, V]; rows kept before may be lost."""
        if len(self.rows) < number or self.rows.shape[1] != like.shape[1] or self.rows.dtype != like.dtype:
            number = max(number, min(2 * len(self.rows), DOUBLING))  # a policy that tries longer drafts soon tries more
            self.version += 1  # first: where there is no memory, the old one is gone all the same
            self.rows = torch.empty(0, 0)  # free the old memory before asking for more
            self.rows = like.new_empty(number, like.shape[1])


class Marks:
    """Times within one round by the device's clock, read without a synchronisation once the round is over."""

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

    def is_over(self) -> bool:
        """Whether it has; asking takes some microseconds."""
        return not self._events or bool(self._events[-1].query())

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if self._events:
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
