"""How far a rule's law lies from the target's, along texts that the target itself would write.

Texts are drawn with the lossless rule. Wherever one of its rounds comes to a drafted position, the laws of target and
draft are known there, and with them the law that any other rule would have emitted: nothing is estimated from samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.checks.base import CheckedPair, CheckResult, Outcome
from forerun.checks.settings import CheckSettings
from forerun.config import SamplingParams
from forerun.math.lossy import LossyRule, kl, outside, total_variation, with_rest
from forerun.math.verify import Decision, Noise, TargetLaw, residual, token_rule
from forerun.measure.progress import Reporter, Silent
from forerun.types import Draft, Law

NAME = "lossy rule"
BATCH = 8  # prompts decoded together


class TokenRule(LossyRule):
    """The lossless rule in the form of the others: the control, which must measure nothing."""

    name = "token"

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        return Decision(*token_rule(target, draft, noise))

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return torch.minimum(draft.at(position).double(), target.at(position).double())

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return with_rest(
            self.kept_law(target, draft, position), residual(target.at(position), draft.at(position)).double()
        )


@dataclass(slots=True)
class Divergence:
    """Of one rule, over all positions seen. Sums are stored, means derived."""

    positions: int = 0  # drafted ones that a round came to
    total_variation: float = 0.0
    largest: float = 0.0
    kl: float = 0.0  # over positions where it is finite
    infinite: int = 0  # positions where something is emitted that the target rules out
    outside: float = 0.0  # mass of such tokens
    acceptance: float = 0.0
    bonuses: int = 0  # positions after a draft that was kept whole
    bonus_total_variation: float = 0.0

    def add(self, emitted: Tensor, target: Tensor, acceptance: Tensor) -> None:
        """Laws [N, V] at N positions, and the chance [N] that the round goes on there."""
        distance, information = total_variation(emitted, target), kl(emitted, target)
        finite = information.isfinite()
        self.positions += len(distance)
        self.total_variation += float(distance.sum())
        self.largest = max(self.largest, float(distance.max()))
        self.kl += float(information[finite].sum())
        self.infinite += int((~finite).sum())
        self.outside += float(outside(emitted, target).sum())
        self.acceptance += float(acceptance.sum())

    def add_bonus(self, emitted: Tensor, target: Tensor) -> None:
        self.bonuses += emitted.shape[0]
        self.bonus_total_variation += float(total_variation(emitted, target).sum())

    def as_dict(self) -> dict[str, float | int | None]:
        """Means over the positions, ready for JSON; None where there were none."""
        return {
            "positions": self.positions,
            "total_variation": _mean(self.total_variation, self.positions),
            "largest_total_variation": self.largest,
            "kl": _mean(self.kl, self.positions - self.infinite),
            "positions_outside_support": self.infinite,
            "mass_outside_support": _mean(self.outside, self.positions),
            "acceptance": _mean(self.acceptance, self.positions),
            "bonus_positions": self.bonuses,
            "bonus_total_variation": _mean(self.bonus_total_variation, self.bonuses),
        }


@dataclass(slots=True, eq=False)
class DivergenceRecorder(LossyRule):
    """Judges as the lossless rule does, and notes what other rules would have emitted at the positions it comes to."""

    rules: tuple[LossyRule, ...]
    divergences: list[Divergence] = field(init=False)
    name = "token"

    def __post_init__(self) -> None:
        self.divergences = [Divergence() for _ in self.rules]

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        num_accepted, next_token = token_rule(target, draft, noise)
        for i in range(draft.width):
            self._note(target, draft.law, i, (num_accepted >= i) & (i < draft.lengths))
        whole = (num_accepted == draft.lengths) & (draft.lengths > 0)
        if bool(whole.any()):
            p = target.at(draft.lengths)[whole]
            for rule, divergence in zip(self.rules, self.divergences, strict=True):
                divergence.add_bonus(rule.bonus_law(target, draft.lengths)[whole], p)
        return Decision(num_accepted, next_token)

    def _note(self, target: TargetLaw, law: Law, i: int, reached: Tensor) -> None:
        if not bool(reached.any()):
            return
        position = torch.full_like(reached, i, dtype=torch.int64)
        p = target.at(position)[reached]
        for rule, divergence in zip(self.rules, self.divergences, strict=True):
            emitted = rule.emitted_law(target, law, position)[reached]
            divergence.add(emitted, p, rule.acceptance(target, law, position)[reached])

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return TokenRule().kept_law(target, draft, position)

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return TokenRule().emitted_law(target, draft, position)


def measure_divergence(
    pair: CheckedPair,
    prompts: Sequence[Sequence[int]],
    rules: Sequence[LossyRule],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> dict[str, Divergence]:
    """By the rules' names, on the same contexts for all; `token`, the lossless one, is measured with them."""
    recorder = DivergenceRecorder((TokenRule(), *rules))
    decoder = replace(pair, rule=recorder).decoder()
    reporter = reporter or Silent()
    reporter.start("divergence", total=len(prompts))
    for start in range(0, len(prompts), BATCH):
        decoder.generate(
            prompts[start : start + BATCH],
            request_ids=range(start, min(start + BATCH, len(prompts))),
            max_new_tokens=max_new_tokens, temperature=params.temperature, top_k=params.top_k or 0, top_p=params.top_p,
            min_p=params.min_p, seed=seed,
        )  # fmt: skip
        reporter.advance(min(BATCH, len(prompts) - start))
    return {rule.name: divergence for rule, divergence in zip(recorder.rules, recorder.divergences, strict=True)}


def check_lossy(
    pair: CheckedPair, prompts: Sequence[Sequence[int]], settings: CheckSettings, reporter: Reporter
) -> list[CheckResult]:
    """Nothing of a lossless rule. A lossy one fails whether or not the samples show it, with how much it bends."""
    if not isinstance(pair.rule, LossyRule):
        return []
    measured = measure_divergence(
        pair,
        prompts,
        [pair.rule],
        settings.params,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        reporter=reporter,
    )
    bent, control = measured[pair.rule.name].as_dict(), measured["token"].as_dict()
    numbers = {"rule": pair.rule.name, "divergence": bent, "lossless": control}
    return [CheckResult(NAME, Outcome.FAILED, f"{pair.rule.warning}; {_summary(bent, control)}", numbers)]


def _summary(bent: dict[str, float | int | None], control: dict[str, float | int | None]) -> str:
    if not bent["positions"]:
        return "nothing was drafted here, so there is nothing to measure"
    parts = [
        f"at {bent['positions']} drafted positions the law of the next token is off by {bent['total_variation']:.1%} "
        f"on average (total variation; at most {bent['largest_total_variation']:.1%}; the lossless rule: "
        f"{control['total_variation']:.1g})"
    ]
    if bent["bonus_positions"] and bent["bonus_total_variation"]:
        parts.append(f"after whole drafts by {bent['bonus_total_variation']:.1%}")
    if bent["mass_outside_support"]:
        parts.append(f"{bent['mass_outside_support']:.2%} falls on tokens the target rules out")
    return "; ".join(parts)


def _mean(total: float, count: int) -> float | None:
    return total / count if count and math.isfinite(total) else None
