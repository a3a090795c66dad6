"""Products of a few rows with a large weight, and what stands right before and after them in a decoder's layer.

`kernels.linear.project` has the same functions: there a weight is streamed once, whatever else is done on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.math.cache_write import rotate_and_write


class Activation(IntEnum):
    """What an MLP does between its products."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3  # its approximation by a hyperbolic tangent
    RELU = 4
    RELU_SQUARED = 5


@dataclass(frozen=True, slots=True)
class Norm:
    """Division by the root of the mean square, then a gain."""

    weight: Tensor  # [H], or [heads, H] where every head has its own
    epsilon: float
    offset: float = 0.0  # of the gain from the weight: Gemma stores gains less one
    wide: bool = False  # whether the gain is applied in float32, and not to what has been rounded


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The mean taken away, division by the standard deviation, a gain and a bias."""

    weight: Tensor  # [H], or [heads, H]
    bias: Tensor | None  # [H]
    epsilon: float
    offset: float = 0.0  # of the gain from the weight; their sum is rounded to the weight's type


@dataclass(frozen=True, slots=True)
class Heads:
    """What queries, keys and values are rotated by, and where keys and values go."""

    num_queries: int  # heads
    num_keys: int
    cos: Tensor  # [R, T] of each token's position: the first T dimensions of a head turn
    sin: Tensor  # [R, T]
    addresses: Tensor  # [R] int64
    key_pool: Tensor  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor  # [slots * capacity, Hk, D], changed in place
    interleaved: bool = False  # see `math.cache_write.rotated`
    # [Hq + 2 Hk] int32: which head of the weight is query, key, value 0, 1 ...; None where they stand in this order.
    order: Tensor | None = None
    query_norm: Norm | None = None  # of each head, before it turns
    key_norm: Norm | None = None

    @property
    def size(self) -> int:
        return self.key_pool.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.cos, self.sin, self.addresses, self.key_pool, self.value_pool

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, (Hq + 2 Hk) * D] as the weight makes it -> queries, keys and values [N, heads, D]."""
        in_heads = projected.unflatten(-1, (-1, self.size))
        in_heads = in_heads if self.order is None else in_heads[:, self.order]
        query, keys, values = in_heads.split([self.num_queries, self.num_keys, self.num_keys], dim=1)
        return query, keys, values


def normed(x: Tensor, norm: Norm | LayerNorm) -> Tensor:
    """[.., H] -> [.., H]: in float32, rounded before the gain (without a bias) and after it, as transformers does."""
    if isinstance(norm, LayerNorm):
        return _layer_normed(x, norm)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.wide:
        return (wide * (norm.offset + norm.weight.float())).to(x.dtype)
    return norm.weight * wide.to(x.dtype)


def _layer_normed(x: Tensor, norm: LayerNorm) -> Tensor:
    gain = norm.weight + norm.offset if norm.offset else norm.weight  # rounded
    if norm.bias is not None:
        return F.layer_norm(x, gain.shape, gain, norm.bias, norm.epsilon)
    return (F.layer_norm(x.float(), x.shape[-1:], eps=norm.epsilon) * gain.float()).to(x.dtype)


def added(
    x: Tensor,  # [N, H]
    change: Tensor,  # [N, H]
    norm: Norm | LayerNorm | None,
    first: Norm | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x + multiplier * first(change), and the norm of it; without a norm, the sum twice."""
    change = change if first is None else normed(change, first)
    total = x + (change if multiplier == 1 else multiplier * change)
    return total, total if norm is None else normed(total, norm)


def activated(x: Tensor, activation: Activation) -> Tensor:
    return FUNCTIONS[activation](x)


FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}


def gated(pairs: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """[N, 2 I] -> [N, I]: the first half activated, times the second."""
    first, second = pairs.chunk(2, dim=-1)
    return activated(first, activation) * second


def project(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
    activation: Activation = Activation.NONE,
    multiplier: float = 1.0,
) -> Tensor:  # [R, N]
    """residual + multiplier * activation(norm(x) @ weight.T + bias)."""
    product = activated(F.linear(x if norm is None else normed(x, norm), weight, bias), activation)
    product = product if multiplier == 1 else multiplier * product
    return product if residual is None else residual + product


def gate(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [2 N, K]
    norm: Norm | None = None,
    bias: Tensor | None = None,  # [2 N]
    activation: Activation = Activation.SILU,
) -> Tensor:  # [R, N]
    """The product with the first half of the weight, activated, times that with the second."""
    return gated(project(x, weight, bias, norm), activation)


def project_heads(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, heads: Heads) -> Tensor:
    """[R, K] with [(Hq + 2 Hk) * D, K] -> rotated queries [R, Hq, D]; keys, rotated, and values are written."""
    return write_heads(project(x, weight, bias, norm), heads)


def write_heads(projected: Tensor, heads: Heads) -> Tensor:
    """[R, (Hq + 2 Hk) * D] as the weight makes it -> rotated queries [R, Hq, D]; keys and values are written."""
    query, keys, values = heads.split(projected)
    query = query if heads.query_norm is None else normed(query, heads.query_norm)
    keys = keys if heads.key_norm is None else normed(keys, heads.key_norm)
    return rotate_and_write(query, keys, values, *heads.tensors, heads.interleaved)
