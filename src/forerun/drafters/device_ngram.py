"""N-gram tables inside recorded rounds: the whole draft of all rows is one look-up after the other on the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from forerun.drafters.device import DeviceDrafter
from forerun.math.ngram import Ngrams
from forerun.models.scorer import Scorer

SHARE = 16  # a table takes one part in so many of a device's memory at most: weights and keys need the rest
MOST_CONTINUATIONS = 64  # verification looks at all of them for every token of the vocabulary
MOST_CONTEXT = 32  # tokens: as many of each row are at hand
# What engines have on their devices, one copy for all of them: it is there for as long as one of them holds it.
_copies: WeakKeyDictionary[Ngrams, WeakValueDictionary[torch.device, Ngrams]] = WeakKeyDictionary()


class DeviceNgrams(DeviceDrafter):
    """A table."""

    reads_recent = True

    def __init__(self, table: Ngrams) -> None:
        self.table = table

    def on(self, device: torch.device) -> Ngrams:
        """The same on a device."""
        copies = _copies.setdefault(self.table, WeakValueDictionary())
        if (copy := copies.get(device)) is None:
            copy = copies[device] = self.table.to(device)
        return copy

    def why_not(self, target: Scorer) -> str | None:
        return why_not(self.table, target.device)

    def room(self, longest: int) -> int:
        return sys.maxsize

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        return 0

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        """Rows' last tokens are all it reads."""

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """Nothing is remembered."""


def why_not(table: Ngrams, device: torch.device) -> str | None:
    """What keeps a table off a device, in words; None where nothing does."""
    if table.most > MOST_CONTINUATIONS:
        return f"an n-gram table with {table.most} continuations of a context (most: {MOST_CONTINUATIONS})"
    if table.order - 1 > MOST_CONTEXT:
        return f"an n-gram table with contexts of {table.order - 1} tokens (most: {MOST_CONTEXT})"
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // SHARE
        if table.num_bytes > most:
            size, room = table.num_bytes / 2**20, most / 2**20
            return f"an n-gram table of {size:.0f} MiB (most: {room:.0f}, a {SHARE}th of the device's memory)"
    return None
