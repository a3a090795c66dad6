"""Timings of attention, and the copy bandwidth they are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from benchmarks.attention.cases import Case
from forerun.measure.provenance import Provenance


@dataclass(frozen=True, slots=True)
class Timing:
    """One method, in one case."""

    case: Case
    method: str
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
class AttentionResults:
    """Every timing of a finished or interrupted run."""

    provenance: Provenance
    repeats: int
    titles: Mapping[str, str]  # of the methods; the first is the baseline
    copy_bytes_per_second: float  # read and written
    timings: tuple[Timing, ...]
    trials: tuple[Trial, ...] = ()

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(m.case for m in self.timings))

    def find(self, case: Case, method: str) -> Timing | None:
        return next((m for m in self.timings if m.case == case and m.method == method), None)

    def share(self, timing: Timing) -> float:
        """Of the copy bandwidth."""
        return timing.bytes_per_second / self.copy_bytes_per_second
