"""Memory that runs out in the middle: how it is known, and how many rows run at once behind it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from forerun.cache.base import CacheFull

CALM = 64  # steps without such an error before one more row is tried; where that fails, twice as many
# How errors of other classes begin, or what they hold: torch's on a CPU, cuBLAS's, the driver's own and Triton's.
PHRASES = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "[CUDA]: out of memory")


class MemoryFull(CacheFull):
    """Memory ran out in a pass whose keys can be cut back: fewer rows will do. Its cause is what was raised."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, be it the host's or the device's; a full cache is another matter."""
    if isinstance(error, MemoryFull):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return not isinstance(error, CacheFull)
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)


@contextmanager
def memory_as_room() -> Iterator[None]:
    """What runs out of memory within is raised as `MemoryFull`, like keys that find no room."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryFull) or not is_out_of_memory(error):
            raise
        drop_tensors(error)
        raise MemoryFull(str(error)) from error


def drop_tensors(error: BaseException) -> None:
    """Of the steps that have ended: a traceback would keep what they had made until the next try is over."""
    traceback.clear_frames(error.__traceback__)


class RowLimit:
    """How many rows run at once once memory has run out; one more again after a while in which it has not.

    Keys are counted beforehand, and what a pass needs beside them is not: it is found out by trying.
    """

    def __init__(self) -> None:
        self.most: int | None = None  # None: as many as have room for their keys
        self.failures_alone = 0  # in a row, of rows that ran alone
        self._calm, self._patience, self._has_tried = 0, CALM, False

    def lower(self, most: int) -> None:
        """Memory ran out: at most so many rows from now on."""
        self._patience = 2 * self._patience if self._has_tried else self._patience
        self.most, self._calm, self._has_tried = max(most, 1), 0, False

    def note_step(self) -> bool:
        """A step has come to its end; whether one more row may run from now on."""
        self.failures_alone = 0
        if self.most is None:
            return False
        self._calm += 1
        if self._calm < self._patience:
            return False
        self.most, self._calm, self._has_tried = self.most + 1, 0, True
        return True

    def lift(self) -> None:
        """No row is left that memory ran out for."""
        self.most, self.failures_alone = None, 0
        self._patience, self._has_tried = CALM, False
