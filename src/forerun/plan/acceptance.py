"""What a drafter gets accepted on the user's prompts, round by round.

Where rounds begin depends on the draft length: long drafts swallow the easy passages, so that their rounds begin at the
hard ones. A chance that was measured at one length is therefore wrong at another, by a tenth and more where a text is
easy in parts. Acceptance is counted at each of several lengths, and used at that length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.plan.rounds import PromptBatch, RoundRunner


@dataclass(frozen=True, slots=True)
class RowRound:
    """A round of one row."""

    drafted: int
    accepted: int
    copied: bool


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """Every prompt decoded with drafts of one length."""

    length: int
    rows: Mapping[int, tuple[RowRound, ...]]  # by prompt

    def cut(self, length: int) -> AcceptanceTrace:
        """The same rounds, had they drafted less: right for each of them, but shorter drafts begin elsewhere."""
        rows = {
            row: tuple(RowRound(min(r.drafted, length), min(r.accepted, length), r.copied) for r in rounds)
            for row, rounds in self.rows.items()
        }
        return AcceptanceTrace(length, rows)

    @property
    def rounds(self) -> Iterator[RowRound]:
        return (r for rounds in self.rows.values() for r in rounds)

    def by_position(self) -> list[tuple[int, int]]:
        """(kept, reached) of every place in the draft."""
        return [
            (
                sum(r.accepted > place for r in self.rounds),
                sum(r.drafted > place and r.accepted >= place for r in self.rounds),
            )
            for place in range(self.length)
        ]

    def survival(self) -> list[float]:
        """Chance that each token of a round and all before it were kept; rounds without a draft count."""
        rounds = list(self.rounds)
        return [sum(r.accepted > place for r in rounds) / max(len(rounds), 1) for place in range(self.length)]


@dataclass(frozen=True, slots=True)
class CountedAcceptance:
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    traces: Mapping[int, AcceptanceTrace]  # by draft length, the shortest first

    @property
    def alpha(self) -> float:
        """Leviathan's: the chance that a draft token is kept where it was reached, over all lengths counted."""
        rounds = [r for trace in self.traces.values() for r in trace.rounds]
        reached = sum(min(r.accepted + 1, r.drafted) for r in rounds)
        return sum(r.accepted for r in rounds) / reached if reached else 0.0

    @property
    def longest(self) -> AcceptanceTrace:
        return self.traces[max(self.traces)]

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it."""
        places, rounds = self.longest.by_position(), list(self.longest.rounds)
        every = [r for trace in self.traces.values() for r in trace.rounds]
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "alpha": self.alpha,
            # of each place of the longest drafts, and how many tokens that rests on
            "by_position": [kept / reached if reached else None for kept, reached in places],
            "reached": [reached for _, reached in places],
            "survival": {length: trace.survival() for length, trace in self.traces.items()},
            "spoken": sum(r.drafted > 0 for r in rounds) / max(len(rounds), 1),  # share of rounds with a draft at all
            "tokens": sum(r.accepted + 1 for r in every),  # decoded to find this out
        }


def measure_acceptance(
    runner: RoundRunner, batches: Sequence[PromptBatch], lengths: Sequence[int]
) -> CountedAcceptance:
    """Decode all prompts with each of `lengths`; only counts are kept, no times."""
    traces = {length: _trace(runner, batches, length) for length in sorted(lengths)}
    return CountedAcceptance(runner.name, batches[0].temperature, traces)


def _trace(runner: RoundRunner, batches: Sequence[PromptBatch], length: int) -> AcceptanceTrace:
    rows: dict[int, list[RowRound]] = {}
    for batch in batches:
        for timed in runner.rounds(batch, lambda: length):
            columns = zip(timed.rows, timed.before, timed.drafted, timed.accepted, timed.copied, strict=True)
            for row, before, drafted, accepted, copied in columns:
                if before < batch.new_tokens:
                    rows.setdefault(row, []).append(RowRound(drafted, accepted, copied))
    return AcceptanceTrace(length, {row: tuple(rounds) for row, rounds in rows.items()})
