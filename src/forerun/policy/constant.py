"""The same draft length in every round."""

from __future__ import annotations

from forerun.arguments import integer
from forerun.types import BatchView, Draft, RoundOutcome


class Constant:
    """Draft `n` tokens for every row; 0 is plain decoding."""

    is_fixed = True  # it may be asked before the round before is known

    def __init__(self, n: int) -> None:
        self.n = integer("draft length", n, 0, remedy="must be an integer >= 0; 0 decodes without drafting")

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(self.n, room) for room in view.max_lengths)

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        return kept_whole(view, draft)

    def observe(self, outcome: RoundOutcome) -> None:
        """A constant has nothing to learn."""

    def __repr__(self) -> str:
        return f"Constant({self.n})"


def kept_whole(view: BatchView, draft: Draft) -> tuple[int, ...]:
    """What a policy answers to `trim` that does not look at evidence: all that was drafted and fits."""
    return tuple(min(length, room) for length, room in zip(draft.lengths.tolist(), view.max_lengths, strict=True))
