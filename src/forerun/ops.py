"""The one place that chooses between a kernel and its reference.

A kernel has its reference's name and signature and goes behind the same function.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from forerun import kernels
from forerun.config import Kernels
from forerun.math import attention as attention_reference
from forerun.math import laws as laws_reference
from forerun.math import verify as verify_reference
from forerun.math.attention import Plan, Scale
from forerun.math.verify import Judge, TargetLaw
from forerun.types import Draft, Keys, Rule, Verdict


def attend(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, Dv]
    plan: Plan,
    scale: Scale,
) -> Tensor:  # [N, Hq, Dv]
    """Attention of each row's new tokens over that row's own keys; see `forerun.math.attention.attend`."""
    return attention_reference.attend(query, keys, values, plan, scale)


def verify(target: TargetLaw, draft: Draft, rule: Rule | Judge, keys: Keys, all_greedy: bool = False) -> Verdict:
    """How much of each draft survives, and what follows; see `forerun.math.verify.verify`."""
    return verify_reference.verify(target, draft, rule, keys, all_greedy)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverse CDF; see `forerun.math.laws.draw`."""
    return laws_reference.draw(weights, uniforms)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, use: Kernels = Kernels.AUTO) -> Tensor:
    """x @ weight.T (+ bias), [.., K] and [M, K] -> [.., M]; on a CPU by our own product where that is faster."""
    if use is Kernels.OFF or x.device.type != "cpu" or x.dtype != weight.dtype or kernels.missing():
        return F.linear(x, weight, bias)
    from forerun.kernels.cpu import choice, linear, threads

    if not linear.fits(weight):
        return F.linear(x, weight, bias)
    if use is Kernels.AUTO and not choice.is_faster(weight, x.shape[:-1].numel()):
        return F.linear(x, weight, bias)
    return linear.linear(x, weight, bias, threads.most_threads())
