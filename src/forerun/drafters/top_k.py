"""A draft that only says its likeliest tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.arguments import integer
from forerun.drafters.base import Drafter, DrafterAround
from forerun.types import Draft, DraftContext, LawParams


class TopK(DrafterAround):
    """Drafts with `inner`, its law cut to the `k` most likely tokens and renormalised; sampled rows only.

    Tokens are drawn from the cut law and reported as drawn from it, so the text stays the target's. It is the lossless
    core of TopK-ImpSpecDec. What it does to acceptance depends on the pair: the draft wastes no guess on its tail, and
    promises more than the target does on its head.
    """

    def __init__(self, inner: Drafter, k: int) -> None:
        super().__init__(inner)
        self.k = integer("k", k, 1, remedy="must be an integer >= 1")

    def propose(self, context: DraftContext) -> Draft:
        return self.inner.propose(replace(context, params=_cut(context.params, self.k)))


def _cut(params: LawParams, k: int) -> LawParams:
    if params.all_greedy:
        return params
    tighter = torch.where(params.top_k > 0, params.top_k.clamp(max=k), k)
    return replace(params, top_k=torch.where(params.temperature > 0, tighter, params.top_k), any_top_k=True)
