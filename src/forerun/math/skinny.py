"""Products of a few rows with a large weight, and what stands right before and after them in a Llama-like layer.

`kernels.skinny` has the same functions: there a weight is streamed once, whatever else is done on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """Division by the root of the mean square, then a gain."""

    weight: Tensor  # [H]
    epsilon: float


def normed(x: Tensor, norm: Norm) -> Tensor:
    """[.., H] -> [.., H]: in float32, rounded before the gain and after it, as transformers does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * wide.to(x.dtype)


def project(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
) -> Tensor:  # [R, N]
    """norm(x) @ weight.T + bias + residual."""
    made = F.linear(x if norm is None else normed(x, norm), weight, bias)
    return made if residual is None else residual + made


def gate(x: Tensor, weight: Tensor, norm: Norm | None = None) -> Tensor:
    """[R, K] with [2 * N, K] -> [R, N]: silu of the product with the first half, times that with the second."""
    first, second = project(x, weight, norm=norm).chunk(2, dim=-1)
    return F.silu(first) * second
