"""How much time may be spent on finding out whether drafting pays. The unit is one plain round."""

from __future__ import annotations

from dataclasses import dataclass

GRANT = 2.4  # what a drafter may lose at the start, and again after it has earned it
HOPE = 0.75  # what a kept token earns on top of its time at first, when few tokens decide
HOPE_LASTS = 24  # tokens tried until that is over
EARNED = 0.1  # of what drafting has gained in all is added to the credit it may hold
MOST = 8.0  # no drafter may hold more: texts change
FAILURES = 2  # trials in a row with nothing kept, after which a class no longer lives on the credit that others earn
PATIENCE = 4  # the largest factor by which failed trials space out the next


@dataclass(frozen=True, slots=True)
class Trial:
    """A round with drafts that are not expected to pay."""

    evidence: int  # the class it is about
    on_credit: bool


class Trust:
    """Two purses: credit, filled by what drafting gains, and an allowance that grows with time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.credit = GRANT
        self.allowance = 0.0
        self._tried = 0
        self._earned = 0.0
        self._failures: dict[int, int] = {}  # by evidence class
        self._patience: dict[int, int] = {}  # by evidence class

    def trial(self, loss: float, evidence: int) -> Trial | None:
        """A trial that is expected to lose `loss`, if it can be paid. Half of it in credit is enough."""
        if self.credit >= loss / 2 and self._failures.get(evidence, 0) < FAILURES:
            return Trial(evidence, on_credit=True)
        if self.allowance >= loss * self._patience.get(evidence, 1):
            return Trial(evidence, on_credit=False)
        return None

    def pass_time(self, rounds: float, wasted: float) -> None:
        """Time went by, `wasted` of it on drafts that were not verified."""
        self.allowance = max(0.0, self.allowance + self._share * rounds - wasted)

    def record_outcome(self, gain: float, kept: float, tried: int) -> None:
        """Book what a round with drafts gained over plain decoding, or lost; `kept` is draft tokens per row."""
        hope = max(0.0, 1 - self._tried / HOPE_LASTS)
        self._tried += tried
        self._earned = max(0.0, self._earned + gain)
        most = min(GRANT * (1 + hope) + EARNED * self._earned, MOST)
        self.credit = min(max(self.credit + gain + HOPE * hope * kept, 0.0), most)

    def conclude(self, trial: Trial, gain: float, kept: float) -> None:
        """A failed trial makes the next one wait longer, and uses up the allowance that paid for it."""
        evidence = trial.evidence
        patience = self._patience.get(evidence, 1)
        if gain > 0:
            self._patience[evidence], self._failures[evidence] = 1, 0
            return
        self._failures[evidence] = self._failures.get(evidence, 0) + (kept == 0)
        self._patience[evidence] = max(2, patience) if trial.on_credit else min(PATIENCE, 2 * patience)
        if not trial.on_credit:
            self.allowance = 0.0
