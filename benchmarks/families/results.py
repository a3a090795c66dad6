"""Seconds of a step, by family and method, and what each family must read for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.measure.provenance import Provenance

PASS, FUSED, MODULES, TRANSFORMERS = "pass", "fused", "modules", "transformers"
STORED, THEIR_STORED = "stored", "transformers bfloat16"  # on a CPU: the same of a file of bfloat16, as each loads it
DECODE, GENERATE = "decode", "generate"  # on a CPU: a token of plain decoding by a call of ours, by model.generate
FIRST_CALL, FIRST_CALL_AGAIN = "first call", "first call, again"  # of two new processes, one after the other
PROMPT, THEIR_PROMPT = "prompt", "prompt by transformers"  # so many positions and one token behind them


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of step of one family by one method."""

    family: str
    method: str  # PASS: one forward pass of fused layers, replayed; the others are decoding as users call it
    rows: int
    positions: int  # new ones of each row
    seconds: float  # the best of several; of decoding see `pairs`
    num_bytes: int = 0  # of weights that a PASS, or a step on a CPU, must read: of experts the chosen ones
    key_bytes: int = 0  # of keys and values that it must read
    pairs: int = 0  # of calls, the median of whose differences this is; 0: of older decoding the best less the best


@dataclass(frozen=True, slots=True)
class FamilyResults:
    """A finished or interrupted run."""

    provenance: Provenance
    settings: dict[str, Any]
    bandwidth: float | None  # bytes a second of a copy; on a CPU of reading, as fast as anything has been seen to
    notes: dict[str, str]  # by family: why there are no fused layers, or what went wrong
    steps: tuple[Step, ...]

    @property
    def on_gpu(self) -> bool:
        return self.provenance.machine.gpu is not None

    def floor(self, family: str, method: str) -> float | None:
        """Seconds that reading the weights of a method takes at least, on a CPU."""
        step = self.step(family, method, 1)
        return None if step is None or not step.num_bytes or not self.bandwidth else step.num_bytes / self.bandwidth

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys([*(step.family for step in self.steps), *self.notes]))

    def step(self, family: str, method: str, rows: int, positions: int = 1) -> Step | None:
        wanted = (family, method, rows, positions)
        return next((s for s in self.steps if (s.family, s.method, s.rows, s.positions) == wanted), None)

    def seconds(self, family: str, method: str, rows: int, positions: int = 1) -> float | None:
        step = self.step(family, method, rows, positions)
        return None if step is None else step.seconds

    def share(self, family: str, rows: int, positions: int = 1, with_keys: bool = False) -> float | None:
        """Of the copy's bandwidth, by weights alone, or by all that must be read."""
        step = self.step(family, PASS, rows, positions)
        if step is None or self.bandwidth is None or not step.seconds:
            return None
        read = step.num_bytes + (step.key_bytes if with_keys else 0)
        return read / step.seconds / self.bandwidth

    def decoded_share(self, family: str, rows: int) -> float | None:
        """Of the copy's bandwidth: the weights that a pass must read over the time of a decoded token."""
        a_pass, seconds = self.step(family, PASS, rows), self.seconds(family, FUSED, rows)
        if a_pass is None or not seconds or self.bandwidth is None:
            return None
        return a_pass.num_bytes / seconds / self.bandwidth
