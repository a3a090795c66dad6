"""Timings of the cells."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.matrix.cells import Cell


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell. An entry a repeat."""

    cell: Cell
    round_seconds: tuple[float, ...]  # the middle round
    token_seconds: tuple[float, ...]  # a token of a row, whatever the batch
    tokens_per_round: float
    capture_seconds: float  # of recording, which is in neither

    @property
    def round(self) -> float:
        return median(self.round_seconds)

    @property
    def token(self) -> float:
        return median(self.token_seconds)

    def times(self, base: Measurement | None) -> float | None:
        """This cell's time as a multiple of the other's."""
        if base is None:
            return None
        return self.round / base.round if self.cell.per_round else self.token / base.token
