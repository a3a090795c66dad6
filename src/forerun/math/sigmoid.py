"""The sigmoid approximation of Wagner et al. (EMNLP 2024, "Optimized Speculative Sampling for GPU"): lossy.

Softmax needs a sum over the vocabulary; a sigmoid needs one logit. The method accepts by

    p_hat = sigma((z_p - alpha) / (beta - alpha)),    q_hat likewise,    0 below alpha and 1 above beta,

which are no probabilities: inside [alpha, beta] they lie in [0.5, 0.731], so that any token the target has not cut is
kept with a chance of at least 0.684, whatever the models think of it. Every step below works on single entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.laws import logits_at, logits_of, normalised, tile_sums
from forerun.math.lossy import LossyRule, draw_next, with_rest
from forerun.math.verify import Decision, Noise, TargetLaw, claimed, kept_prefix, or_else
from forerun.types import Draft, Law

FLOOR = 1e-5  # the published code raises every weight it draws from to this
FIRST_SUM = 1e-6  # and starts the residual's sum here


def sigmoid_scores(logits: Tensor, alpha: float, beta: float) -> Tensor:
    """p_hat or q_hat, entry by entry, in the logits' own dtype; a logit of -inf (cut by top-k or top-p) scores 0.

    The bounds are rounded to that dtype too: in float16 1e5 is infinite and every score NaN, as in the paper's Table 2.
    """
    low, high = (torch.tensor(bound, dtype=logits.dtype, device=logits.device) for bound in (alpha, beta))
    inside = torch.sigmoid((logits - low) / (high - low))
    return torch.where(logits < low, 0.0, torch.where(logits > high, 1.0, inside))


def sigmoid_accepts(p_hat: Tensor, q_hat: Tensor, u: Tensor) -> Tensor:
    """Whether a token is kept: u < min(1, p_hat / q_hat), without dividing by zero. NaN never passes."""
    return u * q_hat < p_hat


def sigmoid_residual(p_hat: Tensor, q_hat: Tensor) -> Tensor:
    """Weights of the token after a refusal, [B, V]: the positive part of p_hat - q_hat. Where p_hat is 0 so is this."""
    return (p_hat - q_hat).clamp(min=0.0)


def published_residual(p_hat: Tensor, q_hat: Tensor) -> Tensor:
    """The same as the published code draws it: normalised, then raised to FLOOR on the whole vocabulary.

    The floor hands V * 1e-5 of weight to tokens of no weight: 34 % of all draws at V = 52 000.
    """
    left = sigmoid_residual(p_hat, q_hat)
    mass = FIRST_SUM + tile_sums(left).sum(dim=-1, keepdim=True)
    return (left.double() / mass).clamp(min=FLOOR)


def published_bonus(logits: Tensor) -> Tensor:
    """Weights of the token after a draft that was kept whole, [B, V]: the logits themselves, raised to FLOOR.

    The published kernel turns the first K rows of the logits into scores and draws from row K + 1 as if it had, too.
    """
    return logits.double().clamp(min=FLOOR)


@dataclass(frozen=True, slots=True)
class Sigmoid(LossyRule):
    """Accept by sigmoid scores.

    Repaired by default: the bonus comes from the target's law, and the token after a refusal from where the target has
    any mass. `as_published` draws the bonus from raw logits and lifts every weight to a floor, as the paper's code did.
    """

    alpha: float = -1e3
    beta: float = 1e3
    as_published: bool = False

    def __post_init__(self) -> None:
        if not self.alpha < 0 < self.beta:
            raise InvalidArgument(f"alpha={self.alpha:g}, beta={self.beta:g}: alpha must be below 0 and beta above")

    @property
    def name(self) -> str:
        published = ",as_published" if self.as_published else ""
        return f"sigmoid:alpha={self.alpha:g},beta={self.beta:g}{published}"

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        p_hat, q_hat = (self._scores(logits_of(law, draft.tokens)) for law in (target, draft.law))
        num_accepted = kept_prefix(sigmoid_accepts(p_hat, q_hat, noise.accept), draft.lengths)
        plain = (draft.lengths == 0).unsqueeze(-1)  # nothing was drafted, so nothing is approximated
        bonus = torch.where(plain, target.at(num_accepted).double(), self._bonus(target, num_accepted))
        rest = self._rest(target, draft.law, num_accepted)
        return Decision(num_accepted, draw_next(num_accepted, draft, bonus, rest, noise))

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        p_hat, q_hat = (self._scores(logits_at(law, position)).double() for law in (target, draft))
        chance = torch.where(p_hat > 0, (p_hat / q_hat).clamp(max=1.0), 0.0)
        return draft.at(position).double() * chance

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        return with_rest(self.kept_law(target, draft, position), self._rest(target, draft, position))

    def bonus_law(self, target: TargetLaw, position: Tensor) -> Tensor:
        return normalised(self._bonus(target, position))

    def _scores(self, logits: Tensor) -> Tensor:
        return sigmoid_scores(logits, self.alpha, self.beta)

    def _rest(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        p_hat, q_hat = (self._scores(logits_at(law, position)) for law in (target, draft))
        q_hat = claimed(q_hat)
        if self.as_published:
            return published_residual(p_hat, q_hat)
        return or_else(sigmoid_residual(p_hat, q_hat).double(), target.at(position).double())

    def _bonus(self, target: TargetLaw, position: Tensor) -> Tensor:
        if self.as_published:
            return published_bonus(logits_at(target, position))
        return target.at(position).double()
