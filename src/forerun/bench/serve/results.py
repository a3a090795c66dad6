"""What was measured, level by level: rates, percentiles, goodput and acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.serve.load import LoadLevel, ServerLoad
from forerun.bench.serve.samples import Counts, RequestSample
from forerun.measure.provenance import Provenance

PERCENTILES = (50, 90, 99)
MEASURES = ("ttft", "tpot", "itl", "e2e")


@dataclass(slots=True)
class ServeResults:
    """Levels in the order they were measured."""

    provenance: Provenance
    settings: dict[str, Any]
    limits: Mapping[str, float]
    levels: list[LoadLevel] = field(default_factory=list)
    counters: dict[str, Counts] = field(default_factory=dict)  # by level, from the server's metrics
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> list[LoadLevel]:
        return [level for level in self.levels if answered(level)]

    @property
    def loads(self) -> list[ServerLoad]:
        return list(dict.fromkeys(level.load for level in self.measured))


def answered(level: LoadLevel) -> list[RequestSample]:
    return [sample for sample in level.samples if sample.is_good]


def values(level: LoadLevel, measure: str) -> list[float]:
    """Seconds of all that were answered; of chunks, the times between them."""
    if measure == "itl":
        return [gap for sample in answered(level) for gap in sample.gaps]
    measured: Iterable[float | None] = (getattr(sample, measure) for sample in answered(level))
    return [value for value in measured if value is not None]


def percentile(numbers: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed; NaN where there is none."""
    if not numbers:
        return math.nan
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def tokens_per_second(level: LoadLevel) -> float:
    return sum(sample.tokens for sample in answered(level)) / level.seconds if level.seconds else 0.0


def requests_per_second(level: LoadLevel) -> float:
    return len(answered(level)) / level.seconds if level.seconds else 0.0


def goodput(level: LoadLevel, limits: Mapping[str, float]) -> float:
    """Requests a second that were answered within all limits."""
    return sum(sample.keeps(limits) for sample in level.samples) / level.seconds if level.seconds else 0.0


def told_counts(level: LoadLevel) -> Counts | None:
    """What the answers' usage says of drafts, all requests added up; None where some do not say."""
    counts = [sample.counts for sample in answered(level)]
    known = [each for each in counts if each is not None]
    if not known or len(known) < len(counts):
        return None
    rounds = [each.rounds for each in known if each.rounds is not None]
    return Counts(sum(each.drafted for each in known), sum(each.accepted for each in known), sum(rounds) or None)
