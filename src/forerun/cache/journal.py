"""The changes of a cache as a list of calls, so that a cache in another process can be brought to the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Change = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method's name and what it was called with


class CacheJournal:
    """Every change of the caches that have it as their `journal`; a call that raises has changed nothing."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.is_inside = False  # a changing method may call others, which the replayed call will call as well

    def take(self) -> list[Change]:
        """All changes since the last call."""
        changes, self.changes = self.changes, []
        return changes


class Journaled(Protocol):
    """What changes by methods marked `change`."""

    journal: CacheJournal | None


J = TypeVar("J", bound=Journaled)
P = ParamSpec("P")
R = TypeVar("R")


def change(method: Callable[Concatenate[J, P], R]) -> Callable[Concatenate[J, P], R]:
    """A method after which rows, lengths, slots or blocks may be others than before: noted where there is a journal.

    Whoever changes the cache (an engine, a scorer, a prefix that is shared), no caller has to know.
    """

    @wraps(method)
    def call(self: J, /, *arguments: P.args, **named: P.kwargs) -> R:
        journal = self.journal
        if journal is None or journal.is_inside:
            return method(self, *arguments, **named)
        journal.is_inside = True
        try:
            result = method(self, *arguments, **named)
        finally:
            journal.is_inside = False
        journal.changes.append((method.__name__, tuple(map(_frozen, arguments)), named))
        return result

    return call


def _frozen(argument: Any) -> Any:
    """Texts of rows go on growing: what is noted is what was given."""
    return tuple(argument) if isinstance(argument, Sequence) and not isinstance(argument, str) else argument
