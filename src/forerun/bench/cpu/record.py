"""What `forerun bench cpu` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from forerun.bench.records import content_of, damaged, provenance_of
from forerun.bench.work import Limits, Work
from forerun.measure.provenance import Provenance

KIND = "cpu steps"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One kind of step by one way; one entry of `seconds` for each sweep over all steps."""

    subject: str
    way: str
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
class CpuRecord:
    """Every timing of a run, and the limits it is held against."""

    provenance: Provenance
    settings: Mapping[str, Any]
    titles: Mapping[str, str]  # of the ways; the first is the baseline
    limits: Limits
    work: Mapping[str, Work]  # by subject
    complete: bool
    measurements: tuple[StepTimes, ...]
    notes: tuple[str, ...] = ()
    kind: str = KIND

    @property
    def baseline(self) -> str:
        return next(iter(self.titles))

    def find(self, subject: str, way: str, batch: int, tokens: int) -> StepTimes | None:
        wanted = (subject, way, batch, tokens)
        return next((m for m in self.measurements if (m.subject, m.way, m.batch, m.tokens) == wanted), None)

    def ways(self, subject: str) -> list[str]:
        return [way for way in self.titles if any(m.subject == subject and m.way == way for m in self.measurements)]

    def batches(self) -> list[int]:
        return sorted({m.batch for m in self.measurements})

    def tokens(self) -> list[int]:
        return sorted({m.tokens for m in self.measurements})

    def floor(self, subject: str, batch: int, tokens: int) -> float:
        """Seconds that the hardware would need at least."""
        return self.work[subject].least_seconds(self.limits, batch, tokens, int(self.settings["past"]))

    def unit(self, subject: str) -> float | None:
        """Seconds of the baseline's one-token step at batch 1, which ratios are to."""
        found = self.find(subject, self.baseline, 1, 1)
        return None if found is None else found.median


def read(path: Path) -> CpuRecord:
    content = content_of(path)
    with damaged(path):
        known = {f.name: content[f.name] for f in fields(CpuRecord)}
        steps = (StepTimes(**{**entry, "seconds": tuple(entry["seconds"])}) for entry in content["measurements"])
        return CpuRecord(
            **known
            | {
                "provenance": provenance_of(content),
                "limits": Limits(**content["limits"]),
                "work": {name: Work(**entry) for name, entry in content["work"].items()},
                "measurements": tuple(steps),
                "notes": tuple(content["notes"]),
            }
        )
