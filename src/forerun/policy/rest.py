"""Rounds in which nobody is asked for a draft: where nothing pays, asking every time is what still costs."""

from __future__ import annotations

from collections.abc import Iterable

WORTH_RESTING = 0.003  # of a plain round: asking that costs no more is done every round
ROUNDS = 7  # of rest after one that was considered in vain
MEMORY = 32.0  # considered rounds
FIRST_HOPE, FIRST_WEIGHT = 0.1, 2.0  # plain rounds that a considered one is expected to gain at first


class Rest:
    """Weighs what considered rounds gain. Rows that were not there before end a rest: their text may be another."""

    def __init__(self) -> None:
        self._left = 0
        self._value, self._weight = FIRST_HOPE, FIRST_WEIGHT
        self._requests: frozenset[int] = frozenset()

    def holds(self, requests: Iterable[int]) -> bool:
        """Whether the coming round of these requests is one of rest."""
        here = frozenset(requests)
        if not here <= self._requests:
            self._left = 0
        self._requests = here
        self._left -= self._left > 0
        return self._left > 0

    def consider(self, gain: float, cost: float, is_plain: bool) -> None:
        """After a round that was not one of rest, in plain rounds: what drafts gained in it, and what asking took.

        One with drafts may be a trial: what it teaches is put to use at once.
        """
        self._weight = min(self._weight + 1, MEMORY)
        self._value += (gain - cost - self._value) / self._weight
        if is_plain and self._value < 0 and cost > WORTH_RESTING:
            self._left = ROUNDS + 1
