"""New keys and values into the cache in one launch, rotated on the way where a family has a rotation.

The reference is `math.cache_write`. Numbers are rounded after every step as torch does, so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import DTYPES, early
from forerun.kernels.linear.norms import scaled
from forerun.kernels.linear.rounding import inverse_of, narrowed, scale_of
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.skinny import Heads, Norm

HEADS_AT_ONCE = 8


def write(
    keys: Tensor,  # [N, Hk, D]
    values: Tensor,  # [N, Hk, Dv]
    addresses: Tensor,  # [N] int64
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
) -> None:
    """Put each new token's key and value at its address."""
    heads, block = keys.shape[1], min(HEADS_AT_ONCE, triton.next_power_of_2(keys.shape[1]))
    pools, rounding = _stored(key_pool, value_pool)
    _write_kernel[(keys.shape[0], triton.cdiv(heads, block))](
        keys, values, addresses, *pools,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), key_pool.stride(0), value_pool.stride(0),
        HEADS=heads, SIZE=keys.shape[2], VALUE_SIZE=values.shape[2], BLOCK_HEADS=block,
        BLOCK_SIZE=triton.next_power_of_2(max(keys.shape[2], values.shape[2])), num_warps=2,
        **rounding, **early(keys.device),
    )  # fmt: skip


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
    places = cos, sin, addresses, key_pool, value_pool
    return _launch(query, keys, values, keys.shape[1], *places, interleaved)


def write_heads(projected: Tensor, heads: Heads) -> Tensor:
    """[N, (Hq + 2 Hk) * D] as the weight makes it -> rotated queries [N, Hq, D]; keys and values are written."""
    norms = (heads.query_norm, heads.key_norm)
    if heads.order is None:
        query, keys, values = heads.split(projected)
        return _launch(query, keys, values, heads.num_keys, *heads.tensors, heads.interleaved, norms=norms)
    states = projected.unflatten(-1, (-1, heads.size))
    return _launch(
        states, states, states, heads.num_keys, *heads.tensors, heads.interleaved, heads.num_queries, heads.order, norms
    )


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_heads: int,
    cos: Tensor,
    sin: Tensor,
    addresses: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    interleaved: bool,
    num_heads: int | None = None,
    order: Tensor | None = None,
    norms: tuple[Norm | None, Norm | None] = (None, None),
) -> Tensor:
    num, _, size = query.shape
    heads = num_heads or query.shape[1]
    out, block = query.new_empty(num, heads, size), min(HEADS_AT_ONCE, triton.next_power_of_2(key_heads))
    query_blocks, key_blocks = triton.cdiv(heads, block), triton.cdiv(key_heads, block)
    first, second = (norm or Norm(query, 0.0) for norm in norms)
    pools, rounding = _stored(key_pool, value_pool)
    _rotate_and_write_kernel[(num, query_blocks + key_blocks)](
        out, query, keys, values, cos, sin, addresses, *pools, query if order is None else order,
        first.weight, second.weight,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        cos.stride(0), sin.stride(0), key_pool.stride(0), value_pool.stride(0),
        first.epsilon, first.offset, second.epsilon, second.offset,
        HEADS=heads, KEY_HEADS=key_heads, QUERY_BLOCKS=query_blocks, SIZE=size, VALUE_SIZE=values.shape[2],
        TURNING=cos.shape[1], INTERLEAVED=interleaved, BLOCK_HEADS=block, BLOCK_HALF=triton.next_power_of_2(size // 2),
        BLOCK_VALUE_SIZE=triton.next_power_of_2(values.shape[2]), HAS_ORDER=order is not None,
        HAS_NORMS=norms[0] is not None, WIDE=first.wide, **rounding, **early(keys.device), num_warps=2,
        enable_fp_fusion=False,  # a fused multiply-add rounds once where torch rounds twice
    )  # fmt: skip
    return out


def _stored(key_pool: Tensor, value_pool: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Pools and their scales as the kernels take them, and how they round."""
    if not isinstance(key_pool, ScaledKeys) or not isinstance(value_pool, ScaledKeys):
        return (key_pool, value_pool, key_pool, value_pool), {"LARGEST": 0.0, "CAPACITY": 1, "FAST": True}
    pools = key_pool.raw, value_pool.raw, key_pool.scales, value_pool.scales
    fast = key_pool.device.type != "cpu"
    return pools, {"LARGEST": key_pool.scheme.largest, "CAPACITY": key_pool.scales.shape[2], "FAST": fast}


def why_not_heads(projected: Tensor, heads: Heads) -> str | None:
    """What `write_heads` does not cover, in words; None where it covers everything."""
    norms = (heads.query_norm, heads.key_norm)
    if any(norm is not None and norm.weight.shape != (heads.size,) for norm in norms):
        return "norms of all heads as one, or a gain for each head"
    if (norms[0] is None) != (norms[1] is None) or (norms[0] and norms[1] and norms[0].wide != norms[1].wide):
        return "norms of queries that are not as those of keys"
    gains = [norm.weight for norm in norms if norm is not None]
    return why_not(projected, heads.key_pool, heads.value_pool, *gains, angles=(heads.cos, heads.sin))


def why_not(*tensors: Tensor, angles: tuple[Tensor, ...] = ()) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything. Angles may be float32 for any type."""
    if tensors[0].dtype not in DTYPES or any(t.dtype != tensors[0].dtype for t in tensors):
        return f"numbers of {tensors[0].dtype}, or of different types"
    if any(t.dtype not in (tensors[0].dtype, torch.float32) for t in angles):
        return "angles of another type than what they turn"
    tensors += angles
    if any(t.stride(-1) != 1 for t in tensors):
        return "a head whose numbers are not contiguous"
    return None


@triton.jit
def _write_kernel(
    k_ptr,  # [N, Hk, D]
    v_ptr,  # [N, Hk, Dv]
    addresses_ptr,  # [N] int64
    key_pool_ptr,  # [P, Hk, D], out
    value_pool_ptr,  # [P, Hk, Dv], out
    key_scale_ptr,  # [slots, Hk, CAPACITY] float32, out, where LARGEST is not 0
    value_scale_ptr,  # [slots, Hk, CAPACITY] float32, out
    k_token,
    k_head,
    v_token,
    v_head,
    key_place,
    value_place,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (token, few heads)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_SIZE)[None, :]
    address = tl.load(addresses_ptr + token)
    is_key = (head < HEADS) & (d < SIZE)
    key = tl.load(k_ptr + token * k_token + head * k_head + d, mask=is_key, other=0.0)
    if LARGEST > 0:
        key = rounded(key, key_scale_ptr, address, head, HEADS, LARGEST, CAPACITY, key_pool_ptr.dtype.element_ty, FAST)
    tl.store(key_pool_ptr + address * key_place + head * SIZE + d, key, mask=is_key)
    is_value = (head < HEADS) & (d < VALUE_SIZE)
    value = tl.load(v_ptr + token * v_token + head * v_head + d, mask=is_value, other=0.0)
    if LARGEST > 0:
        KIND: tl.constexpr = value_pool_ptr.dtype.element_ty
        value = rounded(value, value_scale_ptr, address, head, HEADS, LARGEST, CAPACITY, KIND, FAST)
    tl.store(value_pool_ptr + address * value_place + head * VALUE_SIZE + d, value, mask=is_value)


@triton.jit
def rounded(
    x, scale_ptr, address, head, HEADS: tl.constexpr, LARGEST: tl.constexpr, CAPACITY: tl.constexpr, KIND: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """[heads, numbers of one] as they are stored; their scales [heads] are left in the cache."""
    x = x.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1), LARGEST)[:, None]
    store_scale(scale, scale_ptr, address, head, HEADS, CAPACITY)
    return narrowed(x, scale, inverse_of(scale), LARGEST, KIND, FAST)


@triton.jit
def store_scale(scale, scale_ptr, address, head, HEADS: tl.constexpr, CAPACITY: tl.constexpr):
    place = (address // CAPACITY * HEADS + head) * CAPACITY + address % CAPACITY
    tl.store(scale_ptr + place, scale, mask=head < HEADS)


@triton.jit
def _rotate_and_write_kernel(
    out_ptr,  # [N, Hq, D] rotated queries
    q_ptr,  # [N, Hq, D]
    k_ptr,  # [N, Hk, D]
    v_ptr,  # [N, Hk, Dv]
    cos_ptr,  # [N, TURNING]
    sin_ptr,  # [N, TURNING]
    addresses_ptr,  # [N] int64
    key_pool_ptr,  # [P, Hk, D], out
    value_pool_ptr,  # [P, Hk, Dv], out
    key_scale_ptr,  # [slots, Hk, CAPACITY] float32, out, where LARGEST is not 0
    value_scale_ptr,  # [slots, Hk, CAPACITY] float32, out
    order_ptr,  # [Hq + 2 Hk] int32
    query_gain_ptr,  # [D]
    key_gain_ptr,  # [D]
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cos_token,
    sin_token,
    key_place,
    value_place,
    query_epsilon,
    query_offset,
    key_epsilon,
    key_offset,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_VALUE_SIZE: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    WIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (token, few query heads), then one per (token, few key heads with their values)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ANGLES: tl.constexpr = TURNING // 2
    HIGH: tl.constexpr = 0 if INTERLEAVED else ANGLES
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    low, high = pair_of(i, SIZE, TURNING, INTERLEAVED)
    low = low[None, :]
    high = high[None, :]
    in_half = i < SIZE // 2
    turns = i < ANGLES
    cos_low = tl.load(cos_ptr + token * cos_token + i, mask=turns, other=1.0)[None, :]
    cos_high = tl.load(cos_ptr + token * cos_token + HIGH + i, mask=turns, other=1.0)[None, :]
    sin_low = tl.load(sin_ptr + token * sin_token + i, mask=turns, other=0.0)[None, :]
    sin_high = tl.load(sin_ptr + token * sin_token + HIGH + i, mask=turns, other=0.0)[None, :]
    if block < QUERY_BLOCKS:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        there = (head < HEADS) & in_half[None, :]
        unit = tl.load(order_ptr + head, mask=head < HEADS, other=0) if HAS_ORDER else head
        source = q_ptr + token * q_token + unit * q_head
        target = out_ptr + (token * HEADS + head) * SIZE
        first, second = _rotated(
            source, low, high, cos_low, cos_high, sin_low, sin_high, there,
            query_gain_ptr, query_epsilon, query_offset, SIZE, HAS_NORMS, WIDE,
        )  # fmt: skip
        tl.store(target + low, first, mask=there)
        tl.store(target + high, second, mask=there)
    else:
        head = ((block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        address = tl.load(addresses_ptr + token)
        there = (head < KEY_HEADS) & in_half[None, :]
        unit = tl.load(order_ptr + HEADS + head, mask=head < KEY_HEADS, other=0) if HAS_ORDER else head
        source = k_ptr + token * k_token + unit * k_head
        place = key_pool_ptr + address * key_place + head * SIZE
        low_half, high_half = _rotated(
            source, low, high, cos_low, cos_high, sin_low, sin_high, there,
            key_gain_ptr, key_epsilon, key_offset, SIZE, HAS_NORMS, WIDE,
        )  # fmt: skip
        if LARGEST > 0:
            KIND: tl.constexpr = key_pool_ptr.dtype.element_ty
            low_half = low_half.to(tl.float32)
            high_half = high_half.to(tl.float32)
            peak = tl.max(tl.maximum(tl.abs(low_half), tl.abs(high_half)), 1)
            odd = tl.max(((low_half != low_half) | (high_half != high_half)).to(tl.int32), 1)
            scale = scale_of(peak, odd, LARGEST)[:, None]
            store_scale(scale, key_scale_ptr, address, head, KEY_HEADS, CAPACITY)
            inverse = inverse_of(scale)
            low_half = narrowed(low_half, scale, inverse, LARGEST, KIND, FAST)
            high_half = narrowed(high_half, scale, inverse, LARGEST, KIND, FAST)
        tl.store(place + low, low_half, mask=there)
        tl.store(place + high, high_half, mask=there)
        unit = tl.load(order_ptr + HEADS + KEY_HEADS + head, mask=head < KEY_HEADS, other=0) if HAS_ORDER else head
        e = tl.arange(0, BLOCK_VALUE_SIZE)[None, :]
        is_value = (head < KEY_HEADS) & (e < VALUE_SIZE)
        value = tl.load(v_ptr + token * v_token + unit * v_head + e, mask=is_value, other=0.0)
        if LARGEST > 0:
            VALUE_KIND: tl.constexpr = value_pool_ptr.dtype.element_ty
            value = rounded(value, value_scale_ptr, address, head, KEY_HEADS, LARGEST, CAPACITY, VALUE_KIND, FAST)
        tl.store(value_pool_ptr + address * value_place + head * VALUE_SIZE + e, value, mask=is_value)


@triton.jit
def pair_of(i, SIZE: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions of a head that number i < SIZE / 2 stands for: pairs that turn, then those that do not."""
    ANGLES: tl.constexpr = TURNING // 2
    if INTERLEAVED:
        low = 2 * i
        high = low + 1
    else:
        low = i
        high = i + ANGLES
    if TURNING < SIZE:
        low = tl.where(i < ANGLES, low, i + ANGLES)
        high = tl.where(i < ANGLES, high, i + SIZE // 2)
    return low, high


@triton.jit
def _rotated(
    source, low, high, cos_low, cos_high, sin_low, sin_high, there, gain_ptr, epsilon, offset,
    SIZE: tl.constexpr, HAS_NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Dimension `low` turned with dimension `high`, and the other way round; all of a head's are normed before."""
    KIND: tl.constexpr = source.dtype.element_ty
    first = tl.load(source + low, mask=there, other=0.0)
    second = tl.load(source + high, mask=there, other=0.0)
    if HAS_NORM:
        x, y = first.to(tl.float32), second.to(tl.float32)
        shrink = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / SIZE + epsilon)
        gain = tl.load(gain_ptr + low, mask=low < SIZE, other=0.0).to(tl.float32) + offset
        first = scaled(x * shrink[:, None], gain, KIND, WIDE).to(KIND)
        gain = tl.load(gain_ptr + high, mask=high < SIZE, other=0.0).to(tl.float32) + offset
        second = scaled(y * shrink[:, None], gain, KIND, WIDE).to(KIND)
    low_half = turned(first, cos_low, -second.to(tl.float32), sin_low)
    return low_half, turned(second, cos_high, first.to(tl.float32), sin_high)


@triton.jit
def turned(x, cos, other, sin):
    """x * cos + other * sin, every product and the sum rounded as torch does: to float32 where the angles are."""
    KIND: tl.constexpr = tl.float32 if cos.dtype == tl.float32 else x.dtype
    straight = (x.to(tl.float32) * cos.to(tl.float32)).to(KIND)
    across = (other * sin.to(tl.float32)).to(KIND)
    return (straight.to(tl.float32) + across.to(tl.float32)).to(x.dtype)
