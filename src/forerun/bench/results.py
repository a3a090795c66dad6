"""What a comparison measured: one entry a method and group of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.measure.provenance import Provenance
from forerun.measure.reference import Agreement


@dataclass(frozen=True, slots=True)
class Measurement:
    """One method on one group of prompts, prefill included."""

    method: str
    batch: int
    category: str
    group: int
    repeat: int
    seconds: float
    prompt_tokens: int
    new_tokens: int  # all rows together
    rounds: int  # target forwards times the rows they served
    drafted: int | None  # None where the method does not tell
    accepted: int | None
    repeated: float  # share of 4-grams that the same output already had
    agreement: Agreement | None  # None for the baseline and for sampled text
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of drafting, scoring ..., where known

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """A method that cannot run at a batch size."""

    method: str
    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class PromptTime:
    """One method that read one prompt and wrote one token."""

    method: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The most that a process held which loads the model and decodes."""

    title: str
    peak_bytes: int


@dataclass(slots=True)
class Results:
    """What a comparison has measured until now."""

    provenance: Provenance
    settings: dict[str, Any]
    titles: Mapping[str, str]  # of the methods, in the order they took turns; the first is the baseline
    measurements: list[Measurement] = field(default_factory=list)
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    prompt_times: list[PromptTime] = field(default_factory=list)  # of each method and length the first is a warm-up
    memory: list[MemoryUse] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        return next(iter(self.titles))

    def batches(self) -> list[int]:
        return sorted({m.batch for m in self.measurements})

    def categories(self) -> list[str]:
        return list(dict.fromkeys(m.category for m in self.measurements))

    def of(self, method: str, batch: int) -> list[Measurement]:
        return [m for m in self.measurements if m.method == method and m.batch == batch]

    def by_group(self, method: str, batch: int, category: str) -> dict[tuple[int, int], Measurement]:
        return {(m.repeat, m.group): m for m in self.of(method, batch) if m.category == category}

    def refuses(self, method: str, batch: int) -> bool:
        return any(r.method == method and r.batch == batch for r in self.refusals)
