"""How hard a pair is tested."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.arguments import above, at_least
from forerun.config import SamplingParams
from forerun.errors import InvalidArgument


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
        if self.samples < 100:
            raise InvalidArgument(f"samples={self.samples}: fewer than 100 show nothing; 512 is a good start")
        if not 0 < self.alpha < 1:
            raise InvalidArgument(f"alpha={self.alpha}: must be in (0, 1), the chance of a false alarm")
        at_least(self, 2, "max_new_tokens", remedy="a draft needs room")
        above(self, 0, "temperature", remedy="a distribution is tested")
        at_least(self, 0, "top_k", "seed")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k)
