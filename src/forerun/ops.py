"""The one place that chooses between a kernel and its reference.

A kernel has its reference's name and signature and goes behind the same function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from forerun import kernels
from forerun.config import Kernels, SamplingParams
from forerun.config import kernels as kernels_asked
from forerun.math import attention as attention_reference
from forerun.math import laws as laws_reference
from forerun.math import penalties as penalties_reference
from forerun.math import sample as sample_reference
from forerun.math import verify as verify_reference
from forerun.math.attention import Plan, Scale
from forerun.math.sample import Sample
from forerun.math.verify import Judge, TargetLaw
from forerun.types import Draft, Keys, LawParams, Rule, Verdict


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
    if _on_gpu(draft.lengths):
        from forerun.kernels import verify as kernel

        if isinstance(target, laws_reference.LogitLaw) and kernel.supports(target, draft, rule, all_greedy):
            return kernel.verify(target, draft, rule, keys, all_greedy)
    return verify_reference.verify(target, draft, rule, keys, all_greedy)


def sample(logits: Tensor, params: LawParams, uniforms: Tensor) -> Sample:
    """A draft's tokens from its logits, one a row; see `forerun.math.sample.sample`."""
    if _on_gpu(logits):
        from forerun.kernels import sample as kernel

        if kernel.supports(logits):
            return kernel.sample(logits, params, uniforms)
    return sample_reference.sample(logits, params, uniforms)


def adjust(
    logits: Tensor,  # [n, V] consecutive positions of one row
    prompt: Sequence[int],
    output: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
    forbid: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> Tensor:
    """Bias and penalties along a draft; see `forerun.math.penalties.adjust`."""
    if _on_gpu(logits):
        from forerun.kernels import penalties as kernel

        if kernel.supports(logits):
            return kernel.adjust(logits, prompt, output, drafted, params, forbid, min_new_tokens)
    return penalties_reference.adjust(logits, prompt, output, drafted, params, forbid, min_new_tokens)


def _on_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels may be used for what lies where `tensor` does."""
    return tensor.is_cuda and kernels_asked() is not Kernels.OFF and kernels.triton_missing() is None


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
