"""Drawing one token a row, and what is worth keeping of the row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.math.laws import draw, log_sum_exp, warp
from forerun.types import LawParams


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens, how likely each was, and summaries of their rows where a kernel made them (`math.laws.KEPT`)."""

    tokens: Tensor  # [M] int64
    log_q: Tensor  # [M]
    kept: Tensor | None = None  # [M, 5] float32


def sample(logits: Tensor, params: LawParams, uniforms: Tensor) -> Sample:
    """One token a row of `logits` [M, V], warped as `params` say, by inverse CDF with `uniforms` [M]."""
    weights = warp(logits, params)
    log_q = weights - log_sum_exp(weights).unsqueeze(-1)
    tokens = draw(log_q.exp(), uniforms)
    return Sample(tokens, log_q.gather(1, tokens.unsqueeze(-1)).squeeze(-1))
