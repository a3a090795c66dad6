"""The whole suite on one pair."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from forerun.check import plain
from forerun.check.base import CheckResult, CheckSettings, Outcome, Pair, Tell, tell_nobody
from forerun.check.distribution import check_distribution
from forerun.check.divergence import check_lossy
from forerun.check.greedy import check_greedy
from forerun.check.rows import check_rows
from forerun.errors import ForerunWarning, InvalidArgument

# Ordinary text that repeats itself, so that every kind of drafter has something to propose.
PROMPTS = (
    "The three primary colours are red, yellow and blue. What are the three primary colours? The three primary",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Once upon a time there was a fox who lived in a forest. One morning the fox",
)

OPEN_PROMPTS = (
    "My sister likes music and my brother likes music and my mother likes",
    "The cat sat on the mat. The dog sat on the",
    "Monday was cold. Tuesday was cold. Wednesday was",
    "I went to the market and bought some apples. Then I went to the market and bought some",
)
"""Each ends with words it has used before, so that look-up drafts, and goes on in more than one way."""

MEASURED = 2  # prompts the model's rounding is measured on


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on one pair."""

    findings: tuple[CheckResult, ...]
    settings: CheckSettings

    @property
    def passed(self) -> bool:
        """Whether every test was made and passed."""
        return all(finding.outcome is Outcome.PASSED for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "plan": asdict(self.settings), "findings": [asdict(f) for f in self.findings]}


def check_pair(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    open_prompts: Sequence[Sequence[int]],
    settings: CheckSettings | None = None,
    tell: Tell = tell_nobody,
) -> Report:
    """Test that `pair` gives exactly the target's text. Prompts are token ids; open ones may go on in several ways.

    A pair with a lossy rule never passes.
    """
    if not prompts or not open_prompts:
        raise InvalidArgument(f"{len(prompts)} prompts and {len(open_prompts)} open prompts: give at least one of each")
    settings = settings or CheckSettings()
    tell("the model's own rounding", 0, 1)
    rounding = max(plain.deviation(pair.model, prompt) for prompt in prompts[:MEASURED])
    tell("the model's own rounding", 1, 1)
    with _drafter_failures() as failures:
        findings = [
            check_greedy(pair, prompts, settings, rounding, tell),
            *check_distribution(pair, open_prompts, settings, rounding, tell),
            check_rows(pair, prompts, settings, rounding, tell),
            *check_lossy(pair, [*prompts, *open_prompts], settings, tell),
        ]
    return Report((*findings, *failures), settings)


@contextmanager
def _drafter_failures() -> Iterator[list[CheckResult]]:
    """A drafter that fails costs the engine a draft and the user a warning; here it is a finding."""
    failures: list[CheckResult] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForerunWarning)
        yield failures
    messages = {str(w.message): w for w in caught}
    for text, warning in messages.items():
        if issubclass(warning.category, ForerunWarning):
            failures.append(CheckResult("drafter", Outcome.FAILED, text))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
