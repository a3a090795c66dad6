"""Clocks that tests hand to the engine instead of the real one."""

from __future__ import annotations

import random


class ErraticClock:
    """Every reading comes another random while after the one before, from 0.1 ms to 1 s."""

    def __init__(self, seed: int) -> None:
        self.now, self.random = 0.0, random.Random(seed)

    def __call__(self) -> float:
        self.now += 10 ** self.random.uniform(-4, 0)
        return self.now
