"""The changes of a cache as a list of calls, so that a cache in another process can be brought to the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from forerun.cache.base import KeyValueCache

Change = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method's name and what it was called with

CHANGING = (
    "admit", "begin", "clear", "copy", "extend", "forget", "give_back", "keep", "release", "remember", "reserve",
    "reserve_slots", "rewind", "set_length",
)  # fmt: skip
"""Every method of `KeyValueCache` after which rows, lengths, slots or blocks may be others than before."""


class Journal:
    """Notes down every change of `cache` from now on; a call that raises has changed nothing and is not noted.

    The methods are wrapped on the object: whoever changes the cache (an engine, a scorer, a prefix that is shared) is
    noticed, and no caller has to know.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self._changes: list[Change] = []
        self._is_inside = False  # a changing method may call others, which the replayed call will call as well
        for name in CHANGING:
            setattr(cache, name, self._noted(name, getattr(cache, name)))

    def take(self) -> list[Change]:
        """All changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside = True
            try:
                result = method(*arguments, **named)
            finally:
                self._is_inside = False
            self._changes.append((name, tuple(map(_frozen, arguments)), named))
            return result

        return call


def _frozen(argument: Any) -> Any:
    """Texts of rows go on growing: what is noted is what was given."""
    return tuple(argument) if isinstance(argument, Sequence) and not isinstance(argument, str) else argument


def replay(cache: KeyValueCache, changes: Sequence[Change]) -> Any:
    """Repeat changes that another cache of the same kind and size has seen; what the last of them returned."""
    result = None
    for name, arguments, named in changes:
        assert name in CHANGING, name
        result = getattr(cache, name)(*arguments, **named)
    return result


def digest(cache: KeyValueCache) -> str:
    """Equal for caches whose rows have the same slots, lengths and blocks; keys and values are not looked at."""
    rows = [(row, cache.slot(row), cache.length(row)) for row in sorted(cache.rows)]
    table = None if cache.table is None else cache.table.tolist()
    return hashlib.sha256(repr((rows, cache.num_slots, cache.capacity, table)).encode()).hexdigest()
