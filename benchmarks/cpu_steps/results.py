"""Timings of steps, and what the hardware allows at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from forerun.bench.hardware import Ceilings, Work
from forerun.measure.provenance import Provenance


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One kind of step by one method; one entry of `seconds` for each sweep over all steps."""

    subject: str
    method: str
    batch: int
    tokens: int  # new ones of each row
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)


@dataclass(frozen=True, slots=True)
class CpuResults:
    """Every timing of a finished or interrupted run."""

    provenance: Provenance
    settings: Mapping[str, Any]
    titles: Mapping[str, str]  # of the methods; the first is the baseline
    ceilings: Ceilings
    work: Mapping[str, Work]  # by subject
    steps: tuple[StepTimes, ...]
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        return next(iter(self.titles))

    def find(self, subject: str, method: str, batch: int, tokens: int) -> StepTimes | None:
        wanted = (subject, method, batch, tokens)
        return next((m for m in self.steps if (m.subject, m.method, m.batch, m.tokens) == wanted), None)

    def methods(self, subject: str) -> list[str]:
        return [method for method in self.titles if any((m.subject, m.method) == (subject, method) for m in self.steps)]

    def batches(self) -> list[int]:
        return sorted({m.batch for m in self.steps})

    def tokens(self) -> list[int]:
        return sorted({m.tokens for m in self.steps})

    def floor(self, subject: str, batch: int, tokens: int) -> float:
        """Seconds that the hardware would need at least."""
        return least_seconds(self.work[subject], self.ceilings, batch, tokens, int(self.settings["past"]))

    def unit(self, subject: str) -> float | None:
        """Seconds of the baseline's one-token step at batch 1, which ratios are to."""
        step = self.find(subject, self.baseline, 1, 1)
        return None if step is None else step.median


def least_seconds(work: Work, ceilings: Ceilings, batch: int, tokens: int, past: int) -> float:
    """Of a step of `tokens` new ones a row: the longer of reading and calculating, which may overlap."""
    keys = sum(past + i + 1 for i in range(tokens))  # seen by a row's new tokens together
    read = work.weight_bytes + batch * (past + tokens) * work.bytes_per_key
    operations = batch * (tokens * work.operations_per_token + keys * work.operations_per_key)
    return max(read / ceilings.linear, operations / ceilings.operations)
