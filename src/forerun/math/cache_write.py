"""New keys and values into the cache, in torch; with the rotation of queries and keys where a family has one."""

from __future__ import annotations

import torch
from torch import Tensor


def write(
    keys: Tensor,  # [N, Hk, D] of the new tokens
    values: Tensor,  # [N, Hk, Dv]
    addresses: Tensor,  # [N] int64
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
) -> None:
    """Put each new token's key and value at its address."""
    key_pool.index_copy_(0, addresses, keys)
    value_pool.index_copy_(0, addresses, values)


def rotate_and_write(
    query: Tensor,  # [N, Hq, D] before rotation
    keys: Tensor,  # [N, Hk, D] before rotation
    values: Tensor,  # [N, Hk, Dv]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    addresses: Tensor,  # [N] int64
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
    interleaved: bool = False,
) -> Tensor:  # [N, Hq, D] rotated
    """Rotate queries and keys, and write keys and values."""
    write(rotated(keys, cos, sin, interleaved), values, addresses, key_pool, value_pool)
    return rotated(query, cos, sin, interleaved)


def rotated(states: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[N, H, D], of which the first T dimensions turn in pairs. Rounded after every step, as transformers does: to
    float32 where the angles are float32 (OLMo), and to the states' type at the end.

    Dimension i turns with dimension i + T / 2 (Llama); interleaved, 2 i turns with 2 i + 1 by the i-th angle (GPT-J).
    """
    size = cos.shape[-1]
    if size == 0:
        return states
    turning, still = states[..., :size], states[..., size:]
    if interleaved:
        cos, sin = (half[:, : size // 2].repeat_interleave(2, dim=-1) for half in (cos, sin))
        across = torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
    turned = (turning * cos[:, None] + across * sin[:, None]).to(states.dtype)
    return torch.cat([turned, still], dim=-1) if still.shape[-1] else turned
