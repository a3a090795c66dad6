"""Drafts that the host found and a recorded round verifies: tokens alone, because their law is a point mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engine.row import Row
from forerun.types import Draft


@dataclass(frozen=True, slots=True)
class GivenDraft:
    """Deterministic drafts, one a row of the round."""

    rows: tuple[Row, ...]
    tokens: Sequence[Sequence[int]]  # perhaps none
    evidence: tuple[int, ...]  # as in `Draft`
    # The first token that was found for each row, whether or not the policy kept it; None where nothing was found.
    guesses: tuple[int | None, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    @classmethod
    def nothing(cls, rows: Sequence[Row]) -> GivenDraft:
        number = len(rows)
        return cls(tuple(rows), ((),) * number, (0,) * number, (None,) * number)

    def of_running(self) -> GivenDraft:
        """The same without rows that have finished since."""
        places = [place for place, row in enumerate(self.rows) if row.finish_reason is None]
        return GivenDraft(
            tuple(self.rows[place] for place in places),
            [self.tokens[place] for place in places],
            tuple(self.evidence[place] for place in places),
            tuple(self.guesses[place] for place in places),
        )


def first_tokens(draft: Draft) -> tuple[int | None, ...]:
    """The first drafted token of each row whose draft is deterministic; None for all others."""
    certain = draft.cuttable or (draft.deterministic,) * len(draft.lengths)
    if draft.tree is not None or not draft.width or not any(certain):
        return (None,) * len(draft.lengths)
    rows = zip(draft.tokens[:, 0].tolist(), draft.lengths.tolist(), certain, strict=True)
    return tuple(token if length and sure else None for token, length, sure in rows)
