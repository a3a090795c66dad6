"""New keys and values into the cache, in torch; with the rotation of queries and keys where a family rotates halves."""

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
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    addresses: Tensor,  # [N] int64
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
) -> Tensor:  # [N, Hq, D] rotated
    """Rotate queries and keys as Llama does, and write keys and values."""
    write(rotated(keys, cos, sin), values, addresses, key_pool, value_pool)
    return rotated(query, cos, sin)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, H, D]: dimension i turns with dimension i + D / 2. Rounded after every step, as transformers does."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
