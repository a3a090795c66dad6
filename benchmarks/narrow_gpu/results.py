"""Seconds of passes, prompts and tokens, by scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.measure.provenance import Provenance


@dataclass(frozen=True, slots=True)
class Timing:
    """One thing that was timed."""

    scheme: str
    what: str  # "pass 8x8", "prompt 4096", "plain 1", "fixed 6, 8" ...
    seconds: float  # the best of several
    tokens_per_round: float | None = None  # of decoding with drafts


@dataclass(slots=True)
class NarrowResults:
    """A finished or interrupted run."""

    provenance: Provenance
    settings: dict[str, Any]
    timings: list[Timing] = field(default_factory=list)
    keys: list[Timing] = field(default_factory=list)  # attention of a layer; the scheme is that of its keys
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by scheme: that a pass reads
    notes: dict[str, str] = field(default_factory=dict)

    def seconds(self, scheme: str, what: str) -> float | None:
        return next((t.seconds for t in self.timings if (t.scheme, t.what) == (scheme, what)), None)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(timing.what for timing in self.timings))
