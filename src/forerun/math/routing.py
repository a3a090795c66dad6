"""Routers as data: which experts each row goes through and what each of them counts, in torch.

`kernels.linear.routing` has the same function for few rows: there it takes two launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class Scoring(IntEnum):
    """What becomes of the router's product."""

    SOFTMAX = 0  # over all experts
    SIGMOID = 1
    CHOSEN = 2  # a softmax over the chosen ones alone


@dataclass(frozen=True, slots=True)
class Router:
    """A product with one output an expert, scores, and the best of them."""

    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E]
    most: int  # experts of a row
    scoring: Scoring
    renormalised: bool = False  # what the chosen ones count adds up to one
    multiplier: float = 1.0
    correction: Tensor | None = None  # [E] float32, of scores where experts are chosen, not of what they count
    num_groups: int = 1  # experts stand in groups, of which the best ones are chosen first
    top_groups: int = 1
    is_wide: bool = False  # the product is of float32, and nothing is rounded behind it
    keeps_wide: bool = False  # shares stay float32; otherwise they are rounded to the rows' type


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """[N, H] -> what each chosen expert counts [N, k], which they are [N, k]."""
    logits = F.linear(x.float(), router.weight.float()) if router.is_wide else F.linear(x, router.weight, router.bias)
    wide = logits.float()
    scores = wide
    if router.scoring is not Scoring.CHOSEN:
        scores = wide.softmax(-1) if router.scoring is Scoring.SOFTMAX else torch.sigmoid(wide)
    choice = scores if router.correction is None else scores + router.correction
    if router.num_groups > 1:
        choice = _within_groups(choice, router)
    chosen = choice.topk(router.most, dim=-1)[1]
    shares = scores.gather(1, chosen)
    if router.scoring is Scoring.CHOSEN:
        shares = shares.softmax(-1)
    if router.renormalised:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * router.multiplier
    return shares if router.is_wide or router.keeps_wide else shares.to(x.dtype), chosen


def _within_groups(choice: Tensor, router: Router) -> Tensor:
    """Nothing outside the best groups: those with the best expert, or, of corrected scores, with the best two."""
    groups = choice.unflatten(-1, (router.num_groups, -1))
    best = groups.amax(-1) if router.correction is None else groups.topk(2, dim=-1)[0].sum(-1)
    outside = torch.ones_like(best, dtype=torch.bool).scatter(1, best.topk(router.top_groups, dim=-1)[1], False)
    kept: Tensor = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    return kept
