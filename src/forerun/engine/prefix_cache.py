"""Finished rows whose keys are kept for a request that begins with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.cache.base import common_length
from forerun.types import Source


class PrefixCache:
    """At most `limit` finished rows; the oldest is evicted first. A row keeps its number while it is here."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[int, tuple[Source | None, tuple[int, ...]]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def put(self, number: int, history: Sequence[int], source: Source | None = None) -> None:
        """Keep a finished row, if there is room for any."""
        if self.limit:
            self._kept[number] = source, tuple(history)
        while len(self._kept) > self.limit:
            self.evict()

    def claim(self, prompt: Sequence[int], source: Source | None = None) -> tuple[int, int] | None:
        """The kept row that shares the longest beginning with `prompt` and its length, if any shares some.

        Keys depend on what the encoder read, so only a row of the same source will do.
        """
        kept = [(number, history) for number, (read, history) in self._kept.items() if read == source]
        # The prompt's last token is left out: its logits are wanted.
        shared = {number: common_length(history, prompt[:-1]) for number, history in kept}
        best = max(shared, key=lambda number: shared[number], default=None)
        if best is None or shared[best] == 0:
            return None
        del self._kept[best]
        return best, shared[best]

    def evict(self) -> bool:
        """Let the oldest go; whether there was one."""
        oldest = next(iter(self._kept), None)
        if oldest is not None:
            del self._kept[oldest]
        return oldest is not None

    def clear(self) -> None:
        self._kept = {}
