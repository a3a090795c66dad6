"""Drafts that the host found and a recorded round verifies: tokens alone, because their law is a point mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.engine.row import Row
from forerun.types import Draft


class Guess(NamedTuple):
    """How a deterministic draft begins, whether or not it was verified."""

    evidence: int
    token: int


@dataclass(frozen=True, slots=True)
class HostDraft:
    """What the host has for a round: copies for some rows, and how much is to be drawn for the others."""

    rows: tuple[Row, ...]
    copies: Sequence[Sequence[int]]  # perhaps of no token
    drawn: tuple[int, ...]  # tokens that the device drafts for each row without a copy
    evidence: tuple[int, ...]  # of what is verified, as in `Draft`
    guesses: tuple[Guess | None, ...] | None = None  # of the copies that were found; None: none were looked for

    @property
    def has_copies(self) -> bool:
        return any(self.copies)

    @property
    def copied(self) -> tuple[int, ...]:
        """How much of each row's copy is to be verified."""
        return tuple(map(len, self.copies))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(max, self.copied, self.drawn))

    @classmethod
    def without_copies(cls, rows: Sequence[Row], drawn: tuple[int, ...], evidence: int) -> HostDraft:
        number = len(rows)
        return cls(tuple(rows), ((),) * number, drawn, (evidence,) * number)

    def of_running(self) -> HostDraft:
        """The same without rows that have finished since."""
        places = [place for place, row in enumerate(self.rows) if row.finish_reason is None]
        return HostDraft(
            tuple(self.rows[place] for place in places),
            [self.copies[place] for place in places],
            tuple(self.drawn[place] for place in places),
            tuple(self.evidence[place] for place in places),
            None if self.guesses is None else tuple(self.guesses[place] for place in places),
        )


def guesses_of(draft: Draft) -> tuple[Guess | None, ...]:
    """The beginning of each row's draft where that is deterministic."""
    certain = draft.cuttable or (draft.deterministic,) * len(draft.lengths)
    if draft.tree is not None or not draft.width or not any(certain):
        return (None,) * len(draft.lengths)
    evidence = draft.evidence or (0,) * len(draft.lengths)
    rows = zip(evidence, draft.tokens[:, 0].tolist(), draft.lengths.tolist(), certain, strict=True)
    return tuple(Guess(kind, token) if length and sure else None for kind, token, length, sure in rows)
