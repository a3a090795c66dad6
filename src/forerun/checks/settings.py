"""How hard a pair is tested."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.arguments import integer, number
from forerun.config import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """How much is drawn and how sure the verdict is."""

    samples: int = 512
    """Continuations drawn; four times as many see half the error."""
    alpha: float = 1e-3
    """Chance that the whole suite fails a pair that is exact."""
    temperature: float = 1.0
    """Of the sampled tests."""
    top_k: int = 8
    """Of the sampled tests; 0 is off. Few enough tokens that each is seen often."""
    max_new_tokens: int = 24
    """Tokens of each greedy text; the test of rows takes half."""
    seed: int = 0
    """Another seed draws other continuations."""
    batch: int = 64
    """Rows decoded together in the distribution test."""

    def __post_init__(self) -> None:
        integer("samples", self.samples, 100, remedy="fewer than 100 show nothing; 512 is a good start")
        number("alpha", self.alpha, lambda alpha: 0 < alpha < 1, "must be in (0, 1), the chance of a false alarm")
        integer("max_new_tokens", self.max_new_tokens, 2, remedy="must be at least 2; a draft needs room")
        number("temperature", self.temperature, lambda t: 0 < t < math.inf, "must be above 0; a distribution is tested")
        integer("top_k", self.top_k, 0)
        integer("seed", self.seed, 0)
        integer("batch", self.batch, 1)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k)
