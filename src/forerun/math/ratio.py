"""Lossy rules that change the ratio by which a draft token is kept, and nothing else.

Lenience (Leviathan et al., arXiv:2211.17192, appendix A.5): the draft's probability is multiplied by a factor l < 1
before it is compared with the target's, so a token is kept with probability min(1, p / (l q)). What is drawn after a
refusal stays as it was. No token comes out more than 1 / l times as often as under the target; nothing is promised from
below.

Ensemble verification, transformers' `assistant_ensemble_weight` (DIVERSE, arXiv:2604.07622): drafts are verified
against the mixture v = w p + (1 - w) q, not against the target's p. What is left of v is w times what is left of p, so
corrections are drawn as ever: a round's first token follows v exactly, and lies (1 - w) TV(p, q) away from p. Where
transformers decodes greedily it takes the mixture's argmax; here greedy rows stay the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.lossy import LossyRule, accept_by_ratio, check_fraction
from forerun.math.verify import Decision, Noise, TargetLaw
from forerun.types import Draft, Law


@dataclass(frozen=True, slots=True)
class Lenient(LossyRule):
    """Keep a draft token with probability min(1, p / (factor * q))."""

    factor: float

    def __post_init__(self) -> None:
        check_fraction("factor", self.factor)

    @property
    def name(self) -> str:
        return f"lenient:{self.factor:g}"

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        p, q = target.of(draft.tokens), draft.law.of(draft.tokens)
        return accept_by_ratio(target, draft, p, self.factor * q, noise)

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return torch.minimum(draft.at(position).double(), target.at(position).double() / self.factor)


@dataclass(frozen=True, slots=True)
class Ensemble(LossyRule):
    """Accept by weight * p + (1 - weight) * q. A token the target rules out is kept with probability 1 - weight."""

    weight: float

    def __post_init__(self) -> None:
        check_fraction("weight", self.weight)

    @property
    def name(self) -> str:
        return f"ensemble:{self.weight:g}"

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        p, q = target.of(draft.tokens), draft.law.of(draft.tokens)
        return accept_by_ratio(target, draft, self._mixture(p, q), q, noise)

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        p, q = target.at(position).double(), draft.at(position).double()
        return torch.minimum(q, self._mixture(p, q))

    def _mixture(self, p: Tensor, q: Tensor) -> Tensor:
        return self.weight * p + (1 - self.weight) * q
