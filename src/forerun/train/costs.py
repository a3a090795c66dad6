"""Whether a draft will pay: what it keeps against what it costs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from forerun.math.theory import best_length


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of one sequence, measured on the machine at hand."""

    target_step: float  # one token, plainly
    draft_step: float  # one drafted token
    block_step: float  # the target's pass over a draft of `draft_length` tokens and one more
    draft_length: int
    all_at_once: bool = False  # a draft of any length takes one pass of the drafter: parallel heads

    @property
    def draft_ratio(self) -> float:
        """A draft step over a target step: Leviathan's c."""
        return self.draft_step / self.target_step

    def of_round(self, length: int) -> float:
        """A round that drafts `length` tokens, in target steps; the pass over them grows in a line."""
        growth = max(self.block_step / self.target_step - 1, 0.0) / max(self.draft_length, 1)
        drafted = self.draft_length if self.all_at_once and length else length
        return 1 + drafted * self.draft_ratio + length * growth

    def as_dict(self) -> dict[str, Any]:
        return {
            "target_step_ms": 1e3 * self.target_step,
            "draft_step_ms": 1e3 * self.draft_step,
            "block_step_ms": 1e3 * self.block_step,
            "draft_step_over_target_step": self.draft_ratio,
        }


@dataclass(frozen=True, slots=True)
class Payoff:
    """What the cost formula says."""

    draft_length: int  # the best one; 0 where not drafting is best
    speedup: float  # over plain decoding, at that length

    @property
    def pays(self) -> bool:
        return self.draft_length > 0

    def __str__(self) -> str:
        if not self.pays:
            return "this will not pay: no draft length is faster than plain decoding here"
        return f"this will pay: {self.speedup:.2f} times plain decoding with drafts of {self.draft_length}"

    def as_dict(self) -> dict[str, Any]:
        return {"pays": self.pays, "draft_length": self.draft_length, "speedup": self.speedup, "text": str(self)}


def weigh(survival: Sequence[float], costs: StepCosts) -> Payoff:
    """`survival[i]` is the chance that token i + 1 of a draft and all before it are kept."""
    length = best_length(survival, costs.of_round)
    return Payoff(length, (1 + sum(survival[:length])) / costs.of_round(length))


def survival_of(acceptance: Sequence[float]) -> list[float]:
    """From the chance of each token where it is reached to the chance that all up to it are kept."""
    return list(accumulate(acceptance, operator.mul))
