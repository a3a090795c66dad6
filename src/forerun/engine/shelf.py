"""Finished rows whose keys are kept for a request that begins with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.types import Source


class Shelf:
    """At most `limit` finished rows, the oldest leaves first. Row numbers stay theirs while they are here."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[int, tuple[Source | None, tuple[int, ...]]] = {}
        self._claimed: dict[int, int] = {}

    def put(self, number: int, history: Sequence[int], broken: bool, source: Source | None = None) -> list[int]:
        """Keep a finished row; returns the rows to release instead."""
        if not self.limit or broken:
            return [number]
        self._kept[number] = source, tuple(history)
        if len(self._kept) <= self.limit:
            return []
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        return [oldest]

    def reuse(self, prompt: Sequence[int], source: Source | None = None) -> int | None:
        """Claim the kept row that shares the longest beginning with `prompt`, if any shares some.

        Keys depend on what the encoder read, so only a row of the same source will do.
        """
        kept = [(number, history) for number, (read, history) in self._kept.items() if read == source]
        shared = {number: _common(history, prompt) for number, history in kept}
        best = max(shared, key=lambda number: shared[number], default=None)
        if best is None or shared[best] == 0:
            return None
        del self._kept[best]
        self._claimed[best] = shared[best]
        return best

    def take(self, number: int) -> int | None:
        """Tokens a claimed row still holds of its new prompt, None for a row that is new."""
        return self._claimed.pop(number, None)


def _common(history: Sequence[int], prompt: Sequence[int]) -> int:
    """Shared beginning, the prompt's last token left out: its logits are wanted."""
    count = 0
    for mine, other in zip(history, prompt[:-1], strict=False):
        if mine != other:
            break
        count += 1
    return count
