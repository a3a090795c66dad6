"""Seconds of a step, by family and method, and what each family must read for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.measure.provenance import Provenance

PASS, FUSED, MODULES, TRANSFORMERS = "pass", "fused", "modules", "transformers"


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of step of one family by one method."""

    family: str
    method: str  # PASS: one forward pass of fused layers, replayed; the others are decoding as users call it
    rows: int
    positions: int  # new ones of each row
    seconds: float  # the best of several


@dataclass(frozen=True, slots=True)
class FamilyResults:
    """A finished or interrupted run."""

    provenance: Provenance
    settings: dict[str, Any]
    bandwidth: float | None  # bytes a second of a copy; None on a CPU
    num_bytes: dict[str, int]  # by family: weights that every step reads
    notes: dict[str, str]  # by family: why there are no fused layers, or what went wrong
    steps: tuple[Step, ...]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys([*(step.family for step in self.steps), *self.notes]))

    def seconds(self, family: str, method: str, rows: int, positions: int = 1) -> float | None:
        wanted = (family, method, rows, positions)
        return next((s.seconds for s in self.steps if (s.family, s.method, s.rows, s.positions) == wanted), None)

    def share(self, family: str, method: str, rows: int, positions: int = 1) -> float | None:
        """Of the copy's bandwidth, by weights alone."""
        taken = self.seconds(family, method, rows, positions)
        if taken is None or self.bandwidth is None or family not in self.num_bytes:
            return None
        return self.num_bytes[family] / taken / self.bandwidth
