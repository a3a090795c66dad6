"""Ensemble verification, transformers' `assistant_ensemble_weight` (DIVERSE, arXiv:2604.07622): lossy.

Drafts are judged against the mixture v = w p + (1 - w) q in place of the target's p. What is left of v is w times what
is left of p, so corrections are drawn as ever: a round's first token follows v exactly, and lies (1 - w) TV(p, q) away
from p. Where transformers decodes greedily it takes the mixture's argmax; here greedy rows stay the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.lossy import LossyRule, judge_by_ratio, with_rest
from forerun.math.verify import Judgement, Noise, TargetLaw, residual
from forerun.types import Draft, Law


@dataclass(frozen=True, slots=True)
class Ensemble(LossyRule):
    """Judge by weight * p + (1 - weight) * q. A token the target rules out is kept with probability 1 - weight."""

    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise InvalidArgument(
                f"weight={self.weight:g}: must be above 0 and below 1; 1 would be the lossless rule 'token'"
            )

    @property
    def name(self) -> str:
        return f"ensemble:{self.weight:g}"

    def judge(self, target: TargetLaw, draft: Draft, noise: Noise) -> Judgement:
        p, q = target.of(draft.tokens), draft.law.of(draft.tokens)
        return judge_by_ratio(target, draft, self._mixture(p, q), q, noise)

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        p, q = target.at(position).double(), draft.at(position).double()
        return torch.minimum(q, self._mixture(p, q))

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        rest = residual(target.at(position), draft.at(position))
        return with_rest(self.kept_law(target, draft, position), rest)

    def _mixture(self, p: Tensor, q: Tensor) -> Tensor:
        return self.weight * p + (1 - self.weight) * q
