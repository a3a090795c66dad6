"""What every test of the suite takes and gives: the pair, and one result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from transformers import PreTrainedModel

from forerun.decoder import SpeculativeDecoder
from forerun.drafters.base import Drafter
from forerun.policy.base import Policy
from forerun.rules import AnyRule
from forerun.types import Rule

POLICY = 4
"""A constant: "auto" may find that drafting does not pay in runs this short, and nothing would be tested."""


@dataclass(frozen=True, slots=True)
class CheckedPair:
    """A target and whatever drafts for it."""

    model: PreTrainedModel
    drafter: Drafter | str | None
    policy: str | int | Policy = POLICY
    rule: AnyRule = Rule.TOKEN
    options: Mapping[str, Any] = field(default_factory=dict)  # others of `SpeculativeDecoder`

    def decoder(self, rule: AnyRule | None = None) -> SpeculativeDecoder:
        """A fresh one for every test: a drafter that shares the target's cache belongs to one decoder at a time."""
        return SpeculativeDecoder(self.model, self.drafter, policy=self.policy, rule=rule or self.rule, **self.options)


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
