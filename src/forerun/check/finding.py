"""What one test of the suite has to say."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
