"""What a drafter gets accepted on the user's prompts, round by round.

Where rounds begin depends on the draft length: long drafts swallow the easy passages, so that their rounds begin at the
hard ones. A chance that was measured at one length is therefore wrong at another, by a tenth and more where a text is
easy in parts. Acceptance is counted at each of several lengths, and used at that length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forerun.plan.rounds import PromptBatch, RoundRunner


@dataclass(frozen=True, slots=True)
class RowRound:
    """A round of one row."""

    drafted: int
    accepted: int
    copied: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """Every prompt decoded with drafts of one length."""

    length: int
    rows: Mapping[int, tuple[RowRound, ...]]  # by prompt

    def cut(self, length: int) -> Trace:
        """The same rounds, had they drafted less: right for each of them, but shorter drafts begin elsewhere."""
        rows = {
            row: tuple(RowRound(min(t.drafted, length), min(t.accepted, length), t.copied) for t in turns)
            for row, turns in self.rows.items()
        }
        return Trace(length, rows)

    @property
    def turns(self) -> Iterator[RowRound]:
        return (turn for row in self.rows.values() for turn in row)

    @property
    def accepted(self) -> int:
        return sum(turn.accepted for turn in self.turns)

    @property
    def reached(self) -> int:
        """Draft tokens that were judged: those kept, and the first that was not."""
        return sum(min(turn.accepted + 1, turn.drafted) for turn in self.turns)

    def by_position(self) -> list[tuple[int, int]]:
        """(kept, reached) of every place in the draft."""
        turns = list(self.turns)
        return [
            (
                sum(turn.accepted > place for turn in turns),
                sum(turn.drafted > place and turn.accepted >= place for turn in turns),
            )
            for place in range(self.length)
        ]

    def survival(self) -> list[float]:
        """Chance that each token of a round and all before it were kept; rounds with nothing to say count."""
        turns = list(self.turns)
        return [sum(turn.accepted > place for turn in turns) / max(len(turns), 1) for place in range(self.length)]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One drafter at one temperature."""

    traces: Mapping[int, Trace]  # by draft length, the shortest first

    @property
    def alpha(self) -> float:
        """Leviathan's: the chance that a draft token is kept where it was reached, over all lengths counted."""
        reached = sum(trace.reached for trace in self.traces.values())
        return sum(trace.accepted for trace in self.traces.values()) / reached if reached else 0.0

    @property
    def longest(self) -> Trace:
        return self.traces[max(self.traces)]

    @property
    def spoken(self) -> float:
        """Share of the rounds in which there was a draft at all."""
        turns = list(self.longest.turns)
        return sum(turn.drafted > 0 for turn in turns) / max(len(turns), 1)


def measure_acceptance(
    runner: RoundRunner,
    batches: Sequence[PromptBatch],
    lengths: Sequence[int],
    advance: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Decode all prompts with each of `lengths`; only counts are kept, no times."""
    return Acceptance({length: _trace(runner, batches, length, advance) for length in sorted(lengths)})


def _trace(runner: RoundRunner, batches: Sequence[PromptBatch], length: int, advance: Callable[[], None]) -> Trace:
    rows: dict[int, list[RowRound]] = {}
    for batch in batches:
        for found in runner.rounds(batch, lambda: length):
            turns = zip(found.rows, found.before, found.drafted, found.accepted, found.copied, strict=True)
            for row, before, drafted, accepted, copied in turns:
                if before < batch.new_tokens:
                    rows.setdefault(row, []).append(RowRound(drafted, accepted, copied))
        advance()
    return Trace(length, {row: tuple(turns) for row, turns in rows.items()})
