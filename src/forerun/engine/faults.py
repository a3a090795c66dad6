"""What goes wrong and does not end decoding: where it is told, and where the first of it is kept."""

from __future__ import annotations

import traceback
import warnings

from forerun.errors import FaultWarning


class Faults:
    """Errors of those whose advice the text does not depend on: decoding goes on without it.

    Each culprit is warned of once; the first error is kept with its traceback. With `strict` every one is raised.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.first: str | None = None  # as Python prints it: the frames themselves would keep whole batches alive
        self.count = 0
        self._told: set[int] = set()

    def report(self, culprit: object, error: Exception, consequence: str) -> None:
        """`consequence` says what becomes of the round."""
        self.count += 1
        if self.first is None:
            self.first = "".join(traceback.format_exception(error))
        if self.strict:
            raise error
        if id(culprit) in self._told:
            return
        self._told.add(id(culprit))
        warnings.warn(
            f"{type(culprit).__name__} failed ({type(error).__name__}: {error}); {consequence}; the traceback is "
            "engine.first_fault, and strict=True raises the error",
            FaultWarning,
            stacklevel=4,
        )
