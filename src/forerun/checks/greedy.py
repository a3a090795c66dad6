"""Greedy decoding must give the very tokens of `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from forerun.checks.base import CheckedPair, CheckResult, Outcome
from forerun.checks.settings import CheckSettings
from forerun.measure import reference
from forerun.measure.progress import Reporter
from forerun.measure.reference import Difference

NAME = "greedy text"


def check_greedy(
    pair: CheckedPair, prompts: Sequence[Sequence[int]], settings: CheckSettings, rounding: float, reporter: Reporter
) -> CheckResult:
    """All prompts in one batch against `model.generate` one by one; ties of the best logits are told, not failed."""
    reporter.start("greedy text, with drafts", total=len(prompts) + 1)
    result = pair.decoder().generate(prompts, max_new_tokens=settings.max_new_tokens)
    differences = []
    for row, (prompt, ours) in enumerate(zip(prompts, result.new_tokens, strict=True)):
        reporter.advance()
        reporter.start("greedy text, model.generate")
        theirs = reference.greedy(pair.model, prompt, settings.max_new_tokens)
        if (parted := reference.difference(pair.model, prompt, ours, theirs, rounding, row)) is not None:
            differences.append(parted)
    drafted = result.stats.num_draft_tokens
    numbers = {
        "prompts": len(prompts), "tokens": result.stats.num_emitted_tokens, "drafted": drafted,
        "accepted": result.stats.num_accepted_tokens, "logit_deviation": rounding,
        "differences": [asdict(d) for d in differences],
    }  # fmt: skip
    return CheckResult(NAME, _outcome(differences, drafted, pair), _summary(numbers, differences), numbers)


def _outcome(differences: list[Difference], drafted: int, pair: CheckedPair) -> Outcome:
    if any(not d.is_tie for d in differences):
        return Outcome.FAILED
    return Outcome.PASSED if drafted or pair.drafter is None else Outcome.UNTESTED


def _summary(numbers: dict[str, object], differences: list[Difference]) -> str:
    accepted = f"{numbers['accepted']} of {numbers['drafted']} drafted accepted"
    seen = f"{numbers['prompts']} prompts, {numbers['tokens']} tokens, {accepted}"
    rounding = f"{numbers['logit_deviation']:.1g}"
    faults = [d for d in differences if not d.is_tie]
    ties = len(differences) - len(faults)
    if faults:
        first = faults[0]
        return (
            f"{seen}; {len(faults)} differ from model.generate, the first in prompt {first.row + 1} at token "
            f"{first.position + 1}, {first.gap_in_words} (rounding: {rounding})"
        )
    tie_note = f", apart from {ties} numerical ties (logits closer than twice the rounding, {rounding})"
    return f"{seen}; identical to model.generate{tie_note if ties else ''}"
