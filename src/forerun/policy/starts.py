"""Whether a recorded round should wait for the tokens of the one before it, because a copy may follow them."""

from __future__ import annotations

from forerun.policy.cost import Samples
from forerun.types import RoundOutcome

MEMORY = 32.0  # rounds
FIRST_GUESS = 0.05  # copies that begin in a round, with the weight of two rounds: rare until they are seen


class CopyStarts:
    """How often a copy that is worth verifying begins, and how long the device waits for the host to look for one.

    A round that is sent off before the last one's tokens are known goes without a draft. Where a copy begins there, its
    first token is decoded plainly, which costs one plain round, and what is left of it is verified in the next. Where
    none begins, the time is saved in which the host reads, commits, looks and launches. A copy that goes on is found by
    looking behind the text as far as it is known, so only beginnings count.
    """

    def __init__(self) -> None:
        self.rate = FIRST_GUESS  # beginnings a round and row
        self._weight = 2.0
        self._waits = Samples()
        self._copying: frozenset[int] = frozenset()  # requests whose copy was right in the last round

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.idle_seconds:
            self._waits.add(0.0, outcome.idle_seconds)
        if outcome.guessed is None or outcome.wanted is None:
            return
        columns = zip(outcome.request_ids, outcome.guessed, outcome.wanted, strict=True)
        copying = frozenset(request for request, guess, wanted in columns if wanted and guess and guess[1])
        self._weight = min(self._weight + 1, MEMORY)
        self.rate += (len(copying - self._copying) / len(outcome.rows) - self.rate) / self._weight
        self._copying = copying

    @property
    def wait_seconds(self) -> float:
        """How long the device waits where a round is not sent off early; 0 where that has not been seen."""
        return self._waits.seconds if self._waits.values else 0.0

    def are_worth_waiting_for(self, plain: float) -> bool:
        """Whether beginnings that would be missed cost more than waiting, where a plain round takes `plain` seconds."""
        return not self._waits.values or self.rate * plain >= self._waits.seconds
