"""Products of a few rows with a large weight, and what stands right before and after them in a Llama-like layer.

`kernels.linear.project` has the same functions: there a weight is streamed once, whatever else is done on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.math.cache_write import rotate_and_write


@dataclass(frozen=True, slots=True)
class Norm:
    """Division by the root of the mean square, then a gain."""

    weight: Tensor  # [H]
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The mean taken away, division by the standard deviation, a gain and a bias."""

    weight: Tensor  # [H]
    bias: Tensor  # [H]
    epsilon: float


@dataclass(frozen=True, slots=True)
class Heads:
    """What queries, keys and values are rotated by, and where keys and values go."""

    num_queries: int  # heads
    num_keys: int
    cos: Tensor  # [R, D] of each token's position
    sin: Tensor  # [R, D]
    addresses: Tensor  # [R] int64
    key_pool: Tensor  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor  # [slots * capacity, Hk, D], changed in place

    @property
    def size(self) -> int:
        return self.cos.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.cos, self.sin, self.addresses, self.key_pool, self.value_pool


def normed(x: Tensor, norm: Norm | LayerNorm) -> Tensor:
    """[.., H] -> [.., H]: in float32, rounded before the gain (without a bias) and after it, as transformers does."""
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * wide.to(x.dtype)


def added(x: Tensor, change: Tensor, norm: Norm | LayerNorm) -> tuple[Tensor, Tensor]:
    """[N, H] each -> their sum, and the norm of it."""
    total = x + change
    return total, normed(total, norm)


def gated(pairs: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]: silu of the first half, times the second."""
    first, second = pairs.chunk(2, dim=-1)
    return F.silu(first) * second


def project(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
) -> Tensor:  # [R, N]
    """norm(x) @ weight.T + bias + residual."""
    product = F.linear(x if norm is None else normed(x, norm), weight, bias)
    return product if residual is None else residual + product


def gate(x: Tensor, weight: Tensor, norm: Norm | None = None) -> Tensor:
    """[R, K] with [2 * N, K] -> [R, N]: silu of the product with the first half, times that with the second."""
    return gated(project(x, weight, norm=norm))


def project_heads(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, heads: Heads) -> Tensor:
    """[R, K] with [(Hq + 2 Hk) * D, K] -> rotated queries [R, Hq, D]; keys, rotated, and values are written."""
    projected = project(x, weight, bias, norm).unflatten(-1, (-1, heads.size))
    query, keys, values = projected.split([heads.num_queries, heads.num_keys, heads.num_keys], dim=1)
    return rotate_and_write(query, keys, values, *heads.tensors)
