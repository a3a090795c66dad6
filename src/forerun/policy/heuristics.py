"""Rules without a clock: a constant length, or longer after success and shorter after failure."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

from forerun.arguments import flag, integer
from forerun.errors import InvalidArgument
from forerun.policy.base import Policy
from forerun.types import BatchView, RoundOutcome


class Constant(Policy):
    """Draft `n` tokens for every row; 0 is plain decoding."""

    is_fixed = True

    def __init__(self, n: int) -> None:
        self.n = integer("draft length", n, 0, remedy="must be an integer >= 0; 0 decodes without drafting")

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(self.n, room) for room in view.max_lengths)

    def __repr__(self) -> str:
        return f"Constant({self.n})"


class HfHeuristic(Policy):
    """The rule of transformers' assisted generation, for each row on its own.

    A fully kept draft adds `increase`, any other takes `decrease` away, never below 1. With `persistent` a request
    starts where the last one to finish stopped (transformers' schedule "heuristic"), otherwise at `start`
    ("heuristic_transient").
    """

    def __init__(self, start: int = 5, increase: int = 2, decrease: int = 1, persistent: bool = True) -> None:
        _at_least(1, start=start)
        _at_least(0, increase=increase, decrease=decrease)
        self.start = start
        self.increase = increase
        self.decrease = decrease
        self.persistent = flag("persistent", persistent)
        self._opening = start  # where a new request begins
        self._length: dict[int, int] = {}  # by request id

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        wanted = (self._length.setdefault(request, self._opening) for request in view.request_ids)
        return tuple(min(length, room) for length, room in zip(wanted, view.max_lengths, strict=True))

    def observe(self, outcome: RoundOutcome) -> None:
        for row, request in enumerate(outcome.request_ids):
            if outcome.drafted[row]:  # no draft is neither success nor failure
                # A stop token inside the draft leaves the rest unverified: that is not a fully kept draft.
                kept = outcome.accepted[row] == outcome.drafted[row] and not outcome.ended[row]
                self._length[request] = self._next(self._length.get(request, self._opening), kept)
            if outcome.ended[row]:
                self._close(request)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        for request in request_ids:
            self._length.pop(request, None)

    def for_seed(self) -> Self:
        """One that begins at `start`: where earlier calls stopped would change the text."""
        twin = copy.copy(self)
        twin._opening, twin._length = self.start, {}
        return twin

    def _next(self, length: int, kept: bool) -> int:
        return length + self.increase if kept else max(1, length - self.decrease)

    def _close(self, request: int) -> None:
        last = self._length.pop(request, self._opening)
        if self.persistent:
            self._opening = last


@dataclass(slots=True)
class _Trust:
    """How far one row's drafts are trusted."""

    length: int
    pause: int = 1  # rounds without a draft, the next time there is nothing left of the length
    waited: int = 0

    def learn(self, kept: bool, limit: int) -> None:
        if kept:
            self.length, self.pause = min(self.length + 1, limit), 1
        else:
            self.length -= 1

    def wait(self, patience: int) -> None:
        self.waited += 1
        if self.waited >= self.pause:
            self.length, self.waited, self.pause = 1, 0, min(2 * self.pause, patience)


class OwnAcceptance(Policy):
    """Each row's lengths follow from what became of its own drafts: no clock, no other row, no earlier call.

    A fully kept draft makes the next one longer by one, up to `limit`, any other shorter by one. A row that comes
    down to 0 decodes plainly for one round before it tries a single token again, and for twice as many each time that
    fails, up to `patience`: so a drafter that is never right costs next to nothing. Where drawn drafts are dear
    (`view.needs_clock`) rows get copies alone: whether others pay cannot be known without a clock.
    """

    def __init__(self, start: int = 3, limit: int = 16, patience: int = 32) -> None:
        _at_least(1, start=start, limit=limit, patience=patience)
        self.start, self.limit, self.patience = start, limit, patience
        self._trust: dict[int, _Trust] = {}  # by request id

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """While every row has more than one round to wait: the next has no draft whatever becomes of this one."""
        return bool(self._trust) and all(not t.length and t.waited + 1 < t.pause for t in self._trust.values())

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return (0,) * len(view.rows) if view.needs_clock and view.is_mixed else self._trusted(view)

    def copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        return self._trusted(view) if view.needs_clock else None

    def _trusted(self, view: BatchView) -> tuple[int, ...]:
        wanted = (self._of(request).length for request in view.request_ids)
        return tuple(min(length, room) for length, room in zip(wanted, view.max_lengths, strict=True))

    def observe(self, outcome: RoundOutcome) -> None:
        for row, request in enumerate(outcome.request_ids):
            trust = self._of(request)
            if outcome.drafted[row]:
                trust.learn(outcome.accepted[row] == outcome.drafted[row], self.limit)
            elif not trust.length:
                trust.wait(self.patience)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        for request in request_ids:
            self._trust.pop(request, None)

    def _of(self, request: int) -> _Trust:
        return self._trust.setdefault(request, _Trust(min(self.start, self.limit)))


class BassHeuristic(Policy):
    """Algorithm 1 of BASS (Qian et al. 2024): one length for the whole batch, led by its luckiest row.

    The bracket around l / modulus is a ceiling: a floor would keep the default 7 after a miss, against its text.
    """

    def __init__(self, l0: int = 7, increase: int = 2, modulus: int = 10, limit: int = 32) -> None:
        _at_least(1, l0=l0, modulus=modulus, limit=limit)
        _at_least(0, increase=increase)
        if l0 > limit:
            raise InvalidArgument(f"l0={l0}: must be at most limit={limit}")
        self.l0 = self.length = l0
        self.increase = increase
        self.modulus = modulus
        self.limit = limit
        self._missed = False  # s in the paper: a second miss in a row shortens by one more

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(self.length, room) for room in view.max_lengths)

    def observe(self, outcome: RoundOutcome) -> None:
        if not any(outcome.drafted):
            return
        best = max(outcome.accepted)
        # A draft cut by a budget or by the drafter cannot reach `length`; the longest really drafted is the mark then.
        if best == min(self.length, max(outcome.drafted)):
            self.length = min(self.length + self.increase, self.limit)
            self._missed = False
        else:
            shorter = self.length - -(-self.length // self.modulus) - self._missed
            self.length = max(1, best, shorter)
            self._missed = True

    def for_seed(self) -> Self:
        """One that begins at `l0`: the length that earlier calls came to would change the text."""
        twin = copy.copy(self)
        twin.length, twin._missed = self.l0, False
        return twin


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        integer(name, value, least, remedy=f"must be an integer >= {least}")
