"""What a draft-length policy is: one method that it must have, and defaults for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from forerun.arguments import methods
from forerun.types import BatchView, Draft, RoundOutcome


class Policy(ABC):
    """How long the next draft should be. A subclass needs `lengths`; the other methods have defaults.

    The engine looks at both flags before every round.
    """

    is_fixed: bool = False
    """Its answers depend on no outcome."""
    runs_ahead: bool = False
    """It may be asked for a round while the one before is still under way; if not, it has observed that one first."""

    @property
    def unwrapped(self) -> Any:
        """The object itself; of one that stands in for a user's plain object, that object."""
        return self

    @abstractmethod
    def lengths(self, view: BatchView) -> tuple[int, ...]:
        """Draft length for each row, at most `view.max_lengths`."""

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        """Lengths to keep of a deterministic draft; the answer for rows whose draft was sampled is not used."""
        return kept_whole(view, draft)

    def copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        """Room for deterministic drafts where a drafter also samples (`view.is_mixed`); None: as `lengths` says."""
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """These requests have ended and will not be seen again: in a round that was observed, or between two of them
        (aborted, or out of time)."""

    def for_seed(self) -> Policy:
        """The policy of a sampled call that names a seed: one that must give the same lengths every time."""
        return self


class PlainPolicy(Policy):
    """A user's object with `lengths`, `trim` and `observe` that does not derive from `Policy`.

    The optional methods and attributes of `Policy` are used where the object has them.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    @property
    def unwrapped(self) -> Any:
        return self.plain

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.plain, "is_fixed", False))

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.plain, "runs_ahead", False))

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        lengths: tuple[int, ...] = self.plain.lengths(view)
        return lengths

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        lengths: tuple[int, ...] = self.plain.trim(view, draft)
        return lengths

    def copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        ask = getattr(self.plain, "copy_lengths", None)
        return None if ask is None else ask(view)

    def observe(self, outcome: RoundOutcome) -> None:
        self.plain.observe(outcome)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        if (forget := getattr(self.plain, "forget", None)) is not None:
            forget(request_ids)

    def for_seed(self) -> Policy:
        ask = getattr(self.plain, "for_seed", None)
        other = self.plain if ask is None else ask()
        return self if other is self.plain else wrapped(other)


def wrapped(value: Any) -> Policy:
    """A policy as it is; any other object with the three methods as one."""
    if isinstance(value, Policy):
        return value
    remedy = 'needs lengths, trim and observe; or give "auto" or an integer'
    return PlainPolicy(methods("policy", value, ("lengths", "trim", "observe"), remedy))


def kept_whole(view: BatchView, draft: Draft) -> tuple[int, ...]:
    """All that was drafted and fits: the answer to `trim` of a policy that does not look at evidence."""
    return tuple(min(length, room) for length, room in zip(draft.lengths.tolist(), view.max_lengths, strict=True))
