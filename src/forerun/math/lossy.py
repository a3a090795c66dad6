"""What lossy rules share: a name, a warning, the law they really emit, and how far it lies from the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.laws import draw, normalised
from forerun.math.verify import Decision, Noise, TargetLaw, count_accepted, residual
from forerun.types import Draft, Law


class LossyRule(ABC):
    """A published verification rule that changes the target's law. Never a default; results carry a warning.

    It decides about rows that sample; a greedy row gets the target's greedy text under every rule.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """As `forerun.rules.parse` understands it."""

    @property
    def warning(self) -> str:
        """The sentence that travels with every text made under this rule."""
        return f"the rule {self.name} is lossy: sampled text does not follow the target's distribution"

    @abstractmethod
    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        """How much of each draft is kept, and the token that follows."""

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        """The law [B, V] of the token a round emits at `position` [B], where it came so far and had drafted one.

        At position 0 that is the law of a round's first token. Corrections are the lossless rules', unless said
        otherwise.
        """
        return with_rest(self.kept_law(target, draft, position), residual(target.at(position), draft.at(position)))

    def bonus_law(self, target: TargetLaw, position: Tensor) -> Tensor:
        """The law [B, V] of the token after a draft that was kept whole: the target's own, unless said otherwise."""
        return target.at(position)

    def acceptance(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        """The chance [B] that the round goes on past `position`, where it came so far."""
        return self.kept_law(target, draft, position).sum(dim=-1)

    @abstractmethod
    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        """The part [B, V] of `emitted_law` that comes from tokens that were kept."""


def check_fraction(name: str, value: float) -> None:
    """Refuse a parameter that is not between 0 and 1."""
    if not 0 < value < 1:
        raise InvalidArgument(f"{name}={value:g}: must be above 0 and below 1; 1 would be the lossless rule 'token'")


def total_variation(emitted: Tensor, target: Tensor) -> Tensor:
    """Half the sum of absolute differences of two laws [B, V] -> [B]: the largest error of any event's probability."""
    return (emitted.double() - target.double()).abs().sum(dim=-1) / 2


def kl(emitted: Tensor, target: Tensor) -> Tensor:
    """KL(emitted || target) in nats, [B, V] -> [B]; infinite where something is emitted that the target rules out."""
    ratio = emitted.double() / target.double()
    divergence = torch.where(emitted > 0, emitted.double() * ratio.log(), 0.0).sum(dim=-1)
    return divergence.clamp(min=0.0)  # below 0 only by rounding


def outside(emitted: Tensor, target: Tensor) -> Tensor:
    """The mass [B] that falls on tokens the target rules out."""
    return (emitted.double() * (target == 0)).sum(dim=-1)


def with_rest(kept: Tensor, rest: Tensor) -> Tensor:
    """The whole law [B, V]: what was kept, and what was not spread over `rest` (need not be normalised)."""
    missing = (1 - kept.sum(dim=-1, keepdim=True)).clamp(min=0.0)
    return kept + missing * normalised(rest.double())


def draw_next(num_accepted: Tensor, draft: Draft, bonus: Tensor, rest: Tensor, noise: Noise) -> Tensor:
    """The token after what was kept, [B]: from `bonus` [B, V] if all was, from `rest` [B, V] if a token was refused."""
    u = noise.final.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1)
    refused = num_accepted < draft.lengths
    return draw(torch.where(refused.unsqueeze(-1), rest, bonus), u)


def draw_ordinary(target: TargetLaw, draft: Draft, num_accepted: Tensor, noise: Noise) -> Tensor:
    """The token after what was kept as a lossless rule draws it: from p, or after a refusal from what q left of p."""
    p = target.at(num_accepted)
    return draw_next(num_accepted, draft, p, residual(p, draft.law.at(num_accepted)), noise)


def accept_by_ratio(target: TargetLaw, draft: Draft, wanted: Tensor, offered: Tensor, noise: Noise) -> Decision:
    """Keep each token with probability min(1, wanted / offered), [B, K] each."""
    num_accepted = count_accepted(wanted, offered, noise.accept, draft.lengths)
    return Decision(num_accepted, draw_ordinary(target, draft, num_accepted, noise))
