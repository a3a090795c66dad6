"""What every test of the suite takes and gives: the pair, how hard it is tested, and one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from transformers import PreTrainedModel

from forerun.config import SamplingParams
from forerun.decoder import SpeculativeDecoder
from forerun.drafters.base import Drafter
from forerun.errors import InvalidArgument
from forerun.policy.base import Policy
from forerun.rules import AnyRule
from forerun.types import Rule

# (what is being done, steps done, steps in all)
Tell = Callable[[str, int, int], None]


def tell_nobody(stage: str, done: int, total: int) -> None:
    """For callers without a progress bar."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and whatever drafts for it."""

    model: PreTrainedModel
    drafter: Drafter | None
    policy: str | int | Policy = 4
    """A constant by default: "auto" may find that drafting does not pay in runs this short, and nothing is tested."""
    rule: AnyRule = Rule.TOKEN
    tokenizer: Any = None
    attention: str = "auto"
    kernels: str | None = None
    compile: bool = True

    def decoder(self, rule: AnyRule | None = None) -> SpeculativeDecoder:
        """A fresh one for every test: a drafter that shares the target's cache belongs to one decoder at a time."""
        return SpeculativeDecoder(
            self.model,
            self.drafter,
            policy=self.policy,
            rule=rule or self.rule,
            tokenizer=self.tokenizer,
            attention=self.attention,
            kernels=self.kernels,
            compile=self.compile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """How much is drawn and how sure the verdict is."""

    samples: int = 512
    """Continuations drawn for the distribution test."""
    alpha: float = 1e-3
    """Chance that the whole suite fails a pair that is exact."""
    max_new_tokens: int = 24
    """Of the greedy test; the test of rows takes half."""
    temperature: float = 1.0
    top_k: int = 8
    """Few enough tokens that each is seen often."""
    seed: int = 0
    batch: int = 64
    """Rows decoded together in the distribution test."""

    def __post_init__(self) -> None:
        if self.samples < 100:
            raise InvalidArgument(f"samples={self.samples}: fewer than 100 show nothing; 512 is a good start")
        if not 0 < self.alpha < 1:
            raise InvalidArgument(f"alpha={self.alpha}: must be in (0, 1), the chance of a false alarm")
        if self.max_new_tokens < 2:
            raise InvalidArgument(f"max_new_tokens={self.max_new_tokens}: a draft needs room for at least 2 tokens")
        if self.temperature <= 0:
            raise InvalidArgument(f"temperature={self.temperature}: a distribution test needs a temperature above 0")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k)


class Outcome(StrEnum):
    """A test that had nothing to test is not a test that passed."""

    PASSED = "passed"
    FAILED = "FAILED"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the report."""

    name: str
    outcome: Outcome
    summary: str
    numbers: dict[str, Any] = field(default_factory=dict)  # ready for JSON
