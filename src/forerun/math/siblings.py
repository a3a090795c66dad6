"""Several candidates for one position: which one is kept, and the token that is emitted. Always drawn from p.

The ways differ in how the candidates came about, and each has its own test:

- `top`: the candidates follow from the history (the most likely tokens of a draft, say). The target draws from p and
  the candidate it draws is kept. Kept with the probability that p gives the set.
- `without_replacement`: drawn from q one after the other, those drawn before taken out. Each is tested by modified
  rejection sampling against what the refusals before it left of p (SpecInfer, Miao et al., arXiv:2305.09781).
- `with_replacement`: the same for independent draws from q.
- `k_seq`: independent draws from q, tested one by one by a ratio that is lowered so much that the last refusal leaves a
  law (SpecTr, Sun et al., arXiv:2310.15141).

Candidates are [B, K] token ids in the order they are tested; -1 fills the places of rows that have fewer. Rows do not
know of each other. Uniforms: one a candidate, and one for the token that is drawn where none is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.laws import draw, normalised
from forerun.math.transfer import any_of
from forerun.math.verify import claimed, residual

HALVINGS = 54  # of [1, K], for K-SEQ's ratio


@dataclass(frozen=True, slots=True)
class SiblingChoice:
    """What became of one position."""

    kept: Tensor  # [B] int64, which of the candidates; -1 where none was
    token: Tensor  # [B] int64, that candidate or one the target drew


def top(p: Tensor, candidates: Tensor, final: Tensor) -> SiblingChoice:
    """The target's own draw from p [B, V]; the candidates only decide whether it was foreseen."""
    return foreseen(draw(p, final), candidates)


def foreseen(token: Tensor, candidates: Tensor) -> SiblingChoice:
    """Which candidate the target's own token [B] is."""
    same = candidates == token.unsqueeze(-1)
    if not candidates.shape[1]:
        return SiblingChoice(torch.full_like(token, -1), token)
    return SiblingChoice(torch.where(same.any(dim=-1), same.long().argmax(dim=-1), -1), token)


def without_replacement(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    """Recursive rejection: p, q [B, V], candidates and accept [B, K], final [B]."""
    return _recursive(p, q, candidates, accept, final, replaced=False)


def with_replacement(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    """Recursive rejection where every candidate was drawn from the whole of q."""
    return _recursive(p, q, candidates, accept, final, replaced=True)


def _recursive(
    p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor, replaced: bool
) -> SiblingChoice:
    kept = torch.full(p.shape[:1], -1, device=p.device)
    q = claimed(q)
    for j in range(candidates.shape[1]):
        there = (candidates[:, j] >= 0) & (kept < 0)
        token = candidates[:, j : j + 1].clamp(min=0)
        wanted, offered = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        passed = there & (offered > 0) & (accept[:, j] * offered < wanted)
        kept = torch.where(passed, j, kept)
        refused = (there & ~passed).unsqueeze(-1)
        if not any_of(refused):
            continue
        p = torch.where(refused, normalised(residual(p, q)), p)
        if not replaced:
            q = torch.where(refused, normalised(q.scatter(1, token, 0.0)), q)
    return _chosen(kept, candidates, draw(p, final))


def k_seq(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    """SpecTr's sequential selection: each candidate is kept with probability min(1, p / (rho q)), up to the first."""
    p, q = p.double(), claimed(q.double())
    count = (candidates >= 0).sum(dim=-1)
    rho = k_seq_ratio(p, q, count).unsqueeze(-1)
    token = candidates.clamp(min=0)
    wanted, offered = p.gather(1, token), rho * q.gather(1, token)
    passed = (candidates >= 0) & (offered > 0) & (accept * offered < wanted)
    kept = foreseen(torch.ones_like(count), passed.long()).kept
    offer = torch.minimum(q, p / rho)
    mass = offer.sum(dim=-1, keepdim=True)
    times = torch.where(mass > 0, -torch.expm1(count.unsqueeze(-1) * torch.log1p(-mass.clamp(max=1.0))) / mass, 0.0)
    left = (p - offer * times).clamp(min=0.0)
    good = left.sum(dim=-1, keepdim=True) > 0
    return _chosen(kept, candidates, draw(torch.where(good, left, p), final))


def k_seq_ratio(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """The smallest rho in [1, K] for which what is kept never exceeds p, up to rounding from above: [B] float64.

    One candidate passes with probability b = sum of min(q, p / rho), one of K with 1 - (1 - b) ** K, and this must be
    at most rho b. The left side falls with rho and the right side rises.
    """
    low, high = torch.ones_like(p[:, 0]), count.double().clamp(min=1.0)

    def fits(rho: Tensor) -> Tensor:
        mass = torch.minimum(q, p / rho.unsqueeze(-1)).sum(dim=-1).clamp(max=1.0)
        return -torch.expm1(count * torch.log1p(-mass)) <= rho * mass

    first = fits(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        good = fits(middle)
        low, high = torch.where(good, low, middle), torch.where(good, middle, high)
    return torch.where(first, 1.0, high)


def _chosen(kept: Tensor, candidates: Tensor, otherwise: Tensor) -> SiblingChoice:
    if not candidates.shape[1]:
        return SiblingChoice(kept, otherwise)
    chosen = candidates.gather(1, kept.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return SiblingChoice(kept, torch.where(kept >= 0, chosen, otherwise))
