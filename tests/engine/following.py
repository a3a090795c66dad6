"""A policy that learns and may be asked a round ahead, and one that repeats what another run had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from forerun.policy import Constant
from forerun.types import BatchView, Draft, RoundOutcome


class Follows(Constant):
    """Each row's length follows from what became of its earlier drafts, as far as that has been heard."""

    is_fixed = False

    def __init__(self, runs_ahead: bool = True) -> None:
        super().__init__(0)
        self.runs_ahead = runs_ahead
        self.events: list[tuple[str, int]] = []
        self.drafted: dict[int, list[int]] = defaultdict(list)  # of every round of a request
        self.copied: dict[int, list[bool]] = defaultdict(list)  # whether its draft was deterministic
        self._sum: dict[int, int] = defaultdict(int)

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        self.events.append(("asked", view.round_number))
        wanted = (1 + (3 * self._sum[request] + request) % 5 for request in view.request_ids)
        return tuple(min(length, room) for length, room in zip(wanted, view.max_lengths, strict=True))

    def observe(self, outcome: RoundOutcome) -> None:
        self.events.append(("heard", outcome.round_number))
        copied = outcome.copied or (False,) * len(outcome.rows)
        columns = zip(outcome.request_ids, outcome.drafted, outcome.accepted, copied, strict=True)
        for request, drafted, accepted, copy in columns:
            self.drafted[request].append(drafted)
            self.copied[request].append(copy)
            self._sum[request] += 1 + accepted


class Picky(Follows):
    """Wants a copy verified only where the row's text has a certain length, as strange as any other evidence."""

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        heard = [self._sum[request] for request in view.request_ids]
        columns = zip(draft.lengths.tolist(), heard, strict=True)
        return tuple(length if total % 5 < 2 else 0 for length, total in columns)


class Replayed(Constant):
    """The lengths that another run had; where `copied` says so, of copies rather than drawn drafts.

    Of `unheard` requests that run had the first token from the prompt's own pass, of which a policy does not hear.
    """

    def __init__(
        self,
        drafted: dict[int, list[int]],
        copied: dict[int, list[bool]] | None = None,
        unheard: Collection[int] = (),
    ) -> None:
        super().__init__(0)
        self._left = {request: [0] * (request in unheard) + lengths for request, lengths in drafted.items()}
        kinds = (copied or {}).items()
        self._copied = {request: [False] * (request in unheard) + each for request, each in kinds}
        self._copies: list[int] = []

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        lengths = tuple(self._left[request].pop(0) for request in view.request_ids)
        if not self._copied:
            return lengths
        kinds = [self._copied[request].pop(0) for request in view.request_ids]
        self._copies = [length * copy for length, copy in zip(lengths, kinds, strict=True)]
        return tuple(length * (not copy) for length, copy in zip(lengths, kinds, strict=True))

    def copy_lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(self._copies)
