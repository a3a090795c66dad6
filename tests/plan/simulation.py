"""A machine and a drafter made of numbers, on a clock of their own: what a plan must find out is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from forerun.plan.rounds import Prompt, PromptBatch, TimedRound

PLAIN = 0.020  # seconds of a plain step of one row


def even(alpha: float) -> Callable[[int], float]:
    return lambda position: alpha


def patchy(position: int) -> float:
    """Text whose passages of 24 tokens are easy and hard in turn."""
    return 0.95 if position // 24 % 2 else 0.25


@dataclass
class Simulated:
    """Scoring costs `PLAIN` and `per_position` more for each drafted token; drawing `per_draft` a token."""

    name: str
    alpha: Callable[[int], float] = field(default_factory=lambda: even(0.8))  # by position in the row's text
    per_draft: float = 0.002
    per_position: float = 0.0005
    copies: bool = False
    supply: Callable[[random.Random], int] = lambda rng: 99  # tokens there are to draft
    noise: float = 0.02
    hiccup: float = 0.0  # chance of a round ten times too slow
    drift: float = 0.0  # every round is slower than the one before by so much
    clock: float = 1.0  # grows with the drift
    operations_ratio: float = 0.1

    def rounds(self, batch: PromptBatch, choose: Callable[[], int]) -> Generator[TimedRound, None, None]:
        rng = random.Random(f"{self.name} {batch.ids} {batch.seed}")
        decoded = dict.fromkeys(batch.ids, 1)  # the first round, which reads the prompts, drafts nothing here
        while min(decoded.values()) < batch.new_tokens:
            yield self.one(batch, choose(), decoded, rng)

    def one(self, batch: PromptBatch, length: int, decoded: dict[int, int], rng: random.Random) -> TimedRound:
        drafted = [min(length, self.supply(rng)) for _ in batch.ids]
        accepted = [self.kept(n, decoded[row], rng) for row, n in zip(batch.ids, drafted, strict=True)]
        draw = 0.0 if self.copies else self.per_draft * max(drafted)
        slow = max(rng.gauss(1, self.noise), 0.5) * (10 if rng.random() < self.hiccup else 1) * self.clock
        self.clock *= 1 + self.drift
        before = tuple(decoded.values())
        for row, n in zip(batch.ids, accepted, strict=True):
            decoded[row] += n + 1
        whole = draw + PLAIN + self.per_position * sum(drafted)
        return TimedRound(
            batch.ids, before, tuple(drafted), tuple(accepted), (self.copies,) * batch.size, whole * slow, draw * slow
        )

    def kept(self, drafted: int, start: int, rng: random.Random) -> int:
        return next((n for n in range(drafted) if rng.random() >= self.alpha(start + n)), drafted)


def plain() -> Simulated:
    return Simulated("plain", per_draft=0.0)


def prompts(count: int) -> list[Prompt]:
    return [(7, number) for number in range(count)]
