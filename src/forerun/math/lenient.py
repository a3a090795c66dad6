"""Lenience (Leviathan et al., arXiv:2211.17192, appendix A.5): a draft token need not be quite good enough. Lossy.

The draft's probability is multiplied by a factor l < 1 before it is compared with the target's: a token is kept with
probability min(1, p / (l q)). What is drawn after a refusal stays as it was. No token comes out more than 1 / l times
as often as under the target; nothing is promised from below.
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
