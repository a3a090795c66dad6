"""A policy that learns and may be asked a round ahead, and one that repeats what another run had."""

from __future__ import annotations

from collections import defaultdict

from forerun.policy import Constant
from forerun.types import BatchView, RoundOutcome


class Follows(Constant):
    """Each row's length follows from what became of its earlier drafts, as far as that has been heard."""

    is_fixed = False

    def __init__(self, runs_ahead: bool = True) -> None:
        super().__init__(0)
        self.runs_ahead = runs_ahead
        self.events: list[tuple[str, int]] = []
        self.drafted: dict[int, list[int]] = defaultdict(list)  # of every round of a request
        self._sum: dict[int, int] = defaultdict(int)

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        self.events.append(("asked", view.round_number))
        wanted = (1 + (3 * self._sum[request] + request) % 5 for request in view.request_ids)
        return tuple(min(length, room) for length, room in zip(wanted, view.max_lengths, strict=True))

    def observe(self, outcome: RoundOutcome) -> None:
        self.events.append(("heard", outcome.round_number))
        for request, drafted, accepted in zip(outcome.request_ids, outcome.drafted, outcome.accepted, strict=True):
            self.drafted[request].append(drafted)
            self._sum[request] += 1 + accepted


class Replayed(Constant):
    """The lengths that another run had."""

    def __init__(self, drafted: dict[int, list[int]]) -> None:
        super().__init__(0)
        self._left = {request: list(lengths) for request, lengths in drafted.items()}

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(self._left[request].pop(0) for request in view.request_ids)
