"""Who hears how far a measurement has come."""

from __future__ import annotations

import sys
from typing import Protocol


class Listener(Protocol):
    """Who shows the progress."""

    def starting(self, what: str, total: int | None = None) -> None: ...

    def advance(self) -> None: ...


class Lines:
    """A line a step on standard error, where neither click nor rich is installed."""

    def starting(self, what: str, total: int | None = None) -> None:
        print(what, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Nothing: the next step says so itself."""
