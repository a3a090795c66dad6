"""How far a run has come, and the learning rate there."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR = 0.01  # of the highest rate, at the end of the cosine


@dataclass(frozen=True, slots=True)
class TrainSchedule:
    """A run ends after `steps`, or after `seconds`, whichever is first; the cosine ends with it."""

    steps: int | None
    seconds: float | None
    warm_up: float

    def progress(self, step: int, elapsed: float) -> float:
        """From 0 to 1. Speed is never estimated: the clock itself says how much of a time budget is gone."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.seconds if self.seconds else 0.0
        return min(max(by_steps, by_time), 1.0)

    def factor(self, progress: float) -> float:
        """Of the highest learning rate: up in a line, down along a cosine."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, FLOOR)
        fallen = (progress - self.warm_up) / (1 - self.warm_up)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fallen))
