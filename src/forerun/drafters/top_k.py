"""A draft that only says its likeliest tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from forerun.drafters.fresh import fresh
from forerun.errors import InvalidArgument
from forerun.types import Draft, DraftContext, Drafter, LawParams


class TopK:
    """Drafts with `inner`, its law cut to the `k` most likely tokens and renormalised; sampled rows only.

    Tokens are drawn from the cut law and reported as drawn from it, so the text stays the target's. It is the lossless
    core of TopK-ImpSpecDec. What it does to acceptance depends on the pair: the draft wastes no guess on its tail, and
    promises more than the target does on its head.
    """

    def __init__(self, inner: Drafter, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InvalidArgument(f"k={k!r}: must be an integer >= 1")
        self.inner, self.k = inner, k

    def fresh(self) -> Self:
        """The same around a fresh one."""
        twin = copy.copy(self)
        twin.inner = fresh(self.inner)
        return twin

    def propose(self, context: DraftContext) -> Draft:
        return self.inner.propose(replace(context, params=_cut(context.params, self.k)))

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.inner.rewind(rows, lengths)

    def __getattr__(self, name: str) -> Any:
        """`bind`, `admit`, `release` and whatever else the inner drafter may have, where it has it."""
        if name == "inner":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


def _cut(params: LawParams, k: int) -> LawParams:
    if params.all_greedy:
        return params
    tighter = torch.where(params.top_k > 0, params.top_k.clamp(max=k), k)
    return replace(params, top_k=torch.where(params.temperature > 0, tighter, params.top_k), any_top_k=True)
