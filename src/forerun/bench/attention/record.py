"""What `forerun bench attention` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from forerun.bench.attention.cases import Case
from forerun.bench.records import content_of, damaged, provenance_of
from forerun.measure.provenance import Provenance

KIND = "attention"


@dataclass(frozen=True, slots=True)
class Timing:
    """One way to attend, in one case."""

    case: Case
    way: str
    seconds: tuple[float, ...]  # of one call; one entry a stretch of replays
    deviation: float  # largest difference from the library's result

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Live keys and values over time: what was read in vain does not count."""
        return self.case.live_bytes / self.median


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of the kernel's numbers, in one case."""

    case: Case
    tuning: Mapping[str, int]
    splits: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """Every timing of a run, and the copy bandwidth it is held against."""

    provenance: Provenance
    settings: Mapping[str, Any]
    titles: Mapping[str, str]  # of the ways; the first is the baseline
    copy_bytes_per_second: float  # read and written
    complete: bool
    measurements: tuple[Timing, ...]
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = KIND

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(m.case for m in self.measurements))

    def find(self, case: Case, way: str) -> Timing | None:
        return next((m for m in self.measurements if m.case == case and m.way == way), None)

    def share(self, timing: Timing) -> float:
        """Of the copy bandwidth."""
        return timing.bytes_per_second / self.copy_bytes_per_second


def read(path: Path) -> AttentionRecord:
    content = content_of(path)
    with damaged(path):
        known = {f.name: content[f.name] for f in fields(AttentionRecord)}
        return AttentionRecord(
            **known
            | {
                "provenance": provenance_of(content),
                "measurements": tuple(Timing(**_entry(entry)) for entry in content["measurements"]),
                "trials": tuple(Trial(**_entry(entry)) for entry in content["trials"]),
                "notes": tuple(content["notes"]),
            }
        )


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "case": Case(**entry["case"]), "seconds": tuple(entry["seconds"])}
