"""TopK-ImpSpecDec, Algorithm 1 as published: lossy.

At each drafted position the draft's K most likely tokens are candidates, and one of them, y, is drawn with weights
w = p / q. It is then tested as if it had been drawn from q: kept with probability min(1, p / q), else a token is drawn
from the positive part of p - q. Two things are wrong with it.

The proposal: y follows w, not q, so the test does not make it follow p. With p = q all weights are equal, and the K
candidates come out equally often. A round's first token follows

    w min(1, w) / sum(w)  on the candidates  +  (what was refused) (p - q)+ / TV(p, q).

The context: the laws at the next position are those after the draft's own token x, not after y, and the published
algorithm goes on all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.laws import draw, normalised
from forerun.math.lossy import LossyRule, draw_ordinary, with_rest
from forerun.math.verify import Decision, Noise, TargetLaw, kept_prefix, residual
from forerun.types import Draft, Law


def top_candidates(q: Tensor, k: int) -> Tensor:
    """The k most likely tokens of each law, as a mask [B, V]: of equals the lowest ids, and none without mass."""
    last = q.topk(min(k, q.shape[-1]), dim=-1).values[:, -1:]
    above, level = q > last, q == last
    room = k - above.sum(dim=-1, keepdim=True)
    return (above | (level & (level.cumsum(dim=-1) <= room))) & (q > 0)


def importance_weights(p: Tensor, q: Tensor, k: int) -> Tensor:
    """w = p / q on the candidates and 0 elsewhere, [B, V]."""
    return torch.where(top_candidates(q, k), p.double() / q.double(), 0.0)


@dataclass(frozen=True, slots=True)
class TopKImportance(LossyRule):
    """Candidates drawn by importance weights.

    `as_published` emits every candidate that passes, each tested after the draft's tokens in place of those emitted.
    Otherwise the round ends with the first candidate that is not the draft's own token, so that every token is tested
    in its own context; a round's first token follows the same wrong law.
    """

    k: int
    as_published: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidArgument(f"k={self.k}: there must be at least one candidate; the paper takes 10, 25 and 50")

    @property
    def name(self) -> str:
        return f"topk_importance:{self.k}{'' if self.as_published else ',as_published=false'}"

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        chosen, passed = self._choose(target, draft, noise)
        if self.as_published:
            num_accepted = kept_prefix(passed, draft.lengths)
            return Decision(num_accepted, draw_ordinary(target, draft, num_accepted, noise), chosen)
        num_accepted = kept_prefix(passed & (chosen == draft.tokens), draft.lengths)
        drawn = draw_ordinary(target, draft, num_accepted, noise)
        place = num_accepted.clamp(max=draft.width - 1).unsqueeze(-1)
        sibling = passed.gather(1, place).squeeze(-1) & (num_accepted < draft.lengths)
        return Decision(num_accepted, torch.where(sibling, chosen.gather(1, place).squeeze(-1), drawn))

    def kept_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        passed, q = self._passed_law(target, draft, position), draft.at(position).double()
        return passed if self.as_published else passed * q

    def emitted_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        rest = residual(target.at(position), draft.at(position))
        return with_rest(self._passed_law(target, draft, position), rest)

    def _passed_law(self, target: TargetLaw, draft: Law, position: Tensor) -> Tensor:
        weights = importance_weights(target.at(position), draft.at(position), self.k)
        return normalised(weights) * weights.clamp(max=1.0)

    def _choose(self, target: TargetLaw, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
        """A candidate for every drafted position, and whether it passes: [B, K] each."""
        assert noise.choice is not None
        chosen, passed = torch.zeros_like(draft.tokens), torch.zeros_like(draft.tokens, dtype=torch.bool)
        for i in range(draft.width):
            position = torch.full_like(draft.lengths, i)
            weights = importance_weights(target.at(position), draft.law.at(position), self.k)
            chosen[:, i] = draw(weights, noise.choice[:, i])
            weight = weights.gather(1, chosen[:, i : i + 1]).squeeze(-1)  # p / q; 0 where no candidate has any
            passed[:, i] = noise.accept[:, i] < weight
        return chosen, passed
