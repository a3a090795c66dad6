"""Latent attention's own steps in Triton; the reference is `math.latent`.

Attention itself is `attend`, over latents as keys and as values. Here is what stands around it: one launch for norms,
rotation and the cache's write, one product a head before it and one behind it, each of which reads the weight once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.attention.cache_write import pair_of, turned
from forerun.kernels.launching import DTYPES, needs_upcast
from forerun.math.latent import LatentHeads
from forerun.math.skinny import Norm

FEW, MANY = 16, 64  # tokens that a program multiplies at once
BLOCK_LATENT, BLOCK_VALUE, BLOCK_K = 128, 32, 128


def write_latents(
    projected: Tensor,  # [N, Q + L + T]
    query_norm: Norm | None,
    latent_norm: Norm,
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    addresses: Tensor,  # [N] int64
    latents: Tensor,  # [slots * capacity, 1, L], changed in place
    shared_keys: Tensor,  # [slots * capacity, 1, T], changed in place
    heads: LatentHeads,
) -> Tensor:  # [N, Q]
    """Latents, normed, and shared keys, rotated, into the cache; the first part, normed where there is a norm."""
    size, first = latents.shape[-1], projected.shape[1] - latents.shape[-1] - heads.turning
    query = projected[:, :first] if query_norm is None else projected.new_empty(len(projected), first)
    norm = query_norm or latent_norm
    write_kernel[(len(projected),)](
        query, projected, norm.weight, latent_norm.weight, cos, sin, addresses, latents, shared_keys,
        projected.stride(0), cos.stride(0), latents.stride(0), shared_keys.stride(0), norm.epsilon, latent_norm.epsilon,
        heads.multiplier,
        FIRST=first, BLOCK_FIRST=triton.next_power_of_2(first), SIZE=size, BLOCK_SIZE=triton.next_power_of_2(size),
        TURNING=heads.turning, BLOCK_HALF=triton.next_power_of_2(heads.turning // 2), INTERLEAVED=heads.interleaved,
        IN_HALVES=heads.in_halves, HAS_NORM=query_norm is not None, num_warps=4,
        enable_fp_fusion=False,  # as `cache_write.rotate_and_write`
    )  # fmt: skip
    return query


def absorb(
    query: Tensor,  # [N, H * (P + T)]
    weight: Tensor,  # [H * (P + V), L]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    heads: LatentHeads,
) -> tuple[Tensor, Tensor]:  # [N, H, L], [N, H, T]
    """Queries as latents meet them, and their rotated part, which meets shared keys."""
    rows, size = len(query), weight.shape[1]
    out = query.new_empty(rows, heads.num_heads, size)
    turning = query.new_empty(rows, heads.num_heads, heads.turning)
    tokens = _tokens(query)
    absorb_kernel[(heads.num_heads, triton.cdiv(size, BLOCK_LATENT), triton.cdiv(rows, tokens))](
        out, turning, query, weight, cos, sin, rows, size, query.stride(0), cos.stride(0),
        HEADS=heads.num_heads, PLAIN=heads.plain, BLOCK_PLAIN=max(16, triton.next_power_of_2(heads.plain)),
        VALUE=heads.value, TURNING=heads.turning, BLOCK_HALF=triton.next_power_of_2(heads.turning // 2),
        INTERLEAVED=heads.interleaved, IN_HALVES=heads.in_halves, TOKENS=tokens, BLOCK_N=BLOCK_LATENT,
        UPCAST=needs_upcast(query), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, turning


def expand(mixed: Tensor, weight: Tensor, heads: LatentHeads) -> Tensor:
    """Mixed latents [N, H, L] -> mixed values [N, H * V]."""
    rows, _, size = mixed.shape
    out = mixed.new_empty(rows, heads.num_heads * heads.value)
    tokens = _tokens(mixed)
    expand_kernel[(heads.num_heads, triton.cdiv(heads.value, BLOCK_VALUE), triton.cdiv(rows, tokens))](
        out, mixed, weight, rows, size, HEADS=heads.num_heads, PLAIN=heads.plain, VALUE=heads.value, TOKENS=tokens,
        BLOCK_N=BLOCK_VALUE, BLOCK_K=BLOCK_K, UPCAST=needs_upcast(mixed), num_warps=4,
    )  # fmt: skip
    return out


def why_not(*tensors: Tensor) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything."""
    if any(t.dtype != tensors[0].dtype or t.dtype not in DTYPES for t in tensors):
        return "tensors of different types"
    if any(t.stride(-1) != 1 for t in tensors):
        return "numbers that do not lie side by side"
    return None


def _tokens(states: Tensor) -> int:
    return FEW if len(states) <= FEW or states.dtype is torch.float32 else MANY


@triton.jit
def write_kernel(
    query_ptr,  # [N, Q], out
    made_ptr,  # [N, Q + L + T]
    query_gain_ptr,  # [Q]
    latent_gain_ptr,  # [L]
    cos_ptr,  # [N, TURNING]
    sin_ptr,  # [N, TURNING]
    addresses_ptr,  # [N] int64
    latents_ptr,  # [P, 1, L], out
    shared_keys_ptr,  # [P, 1, T], out
    made_token,
    cos_token,
    latent_place,
    key_place,
    query_epsilon,
    latent_epsilon,
    latent_multiplier,
    FIRST: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_HALVES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    source = made_ptr + token * made_token
    address = tl.load(addresses_ptr + token)
    if HAS_NORM:
        norm(source, query_gain_ptr, query_ptr + token * FIRST, query_epsilon, 1.0, FIRST, BLOCK_FIRST)
    norm(
        source + FIRST, latent_gain_ptr, latents_ptr + address * latent_place, latent_epsilon, latent_multiplier, SIZE,
        BLOCK_SIZE,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_HALF)
    turn(
        source + FIRST + SIZE, shared_keys_ptr + address * key_place, cos_ptr + token * cos_token,
        sin_ptr + token * cos_token, i, i < TURNING // 2, TURNING, INTERLEAVED, IN_HALVES,
    )  # fmt: skip


@triton.jit
def absorb_kernel(
    out_ptr,  # [N, H, L]
    turning_ptr,  # [N, H, T], out
    q_ptr,  # [N, H * (P + T)]
    w_ptr,  # [H * (P + V), L]
    cos_ptr,  # [N, TURNING]
    sin_ptr,  # [N, TURNING]
    R,
    L,
    q_token,
    cos_token,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_HALVES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per (head, tile of the latent, some tokens); the first tile's rotates as well."""
    head = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    p = tl.arange(0, BLOCK_PLAIN)
    source = q_ptr + r.to(tl.int64)[:, None] * q_token + head * (PLAIN + TURNING)
    q = tl.load(source + p[None, :], mask=(r < R)[:, None] & (p < PLAIN)[None, :], other=0.0)
    row = (head * (PLAIN + VALUE) + p).to(tl.int64)
    w = tl.load(w_ptr + row[:, None] * L + n[None, :], mask=(p < PLAIN)[:, None] & (n < L)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        w = w.to(tl.float32)
    product = tl.dot(q, w, input_precision="ieee")
    place = (r.to(tl.int64)[:, None] * HEADS + head) * L + n[None, :]
    tl.store(out_ptr + place, product.to(out_ptr.dtype.element_ty), mask=(r < R)[:, None] & (n < L)[None, :])
    if tl.program_id(1) == 0:
        target = turning_ptr + (r.to(tl.int64)[:, None] * HEADS + head) * TURNING
        angles = r.to(tl.int64)[:, None] * cos_token
        i = tl.arange(0, BLOCK_HALF)[None, :]
        turn(
            source + PLAIN, target, cos_ptr + angles, sin_ptr + angles, i, (r < R)[:, None] & (i < TURNING // 2),
            TURNING, INTERLEAVED, IN_HALVES,
        )  # fmt: skip


@triton.jit
def expand_kernel(
    out_ptr,  # [N, H * V]
    x_ptr,  # [N, H, L]
    w_ptr,  # [H * (P + V), L]
    R,
    L,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per (head, tile of its values, some tokens)."""
    head = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row = (head * (PLAIN + VALUE) + PLAIN + tl.minimum(n, VALUE - 1)).to(tl.int64)
    source = x_ptr + (r.to(tl.int64)[:, None] * HEADS + head) * L
    total = tl.zeros([TOKENS, BLOCK_N], dtype=tl.float32)
    for begin in range(0, L, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x = tl.load(source + k[None, :], mask=(r < R)[:, None] & (k < L)[None, :], other=0.0)
        w = tl.load(w_ptr + row[:, None] * L + k[None, :], mask=(k < L)[None, :], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    place = (r.to(tl.int64)[:, None] * HEADS + head) * VALUE + n[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(r < R)[:, None] & (n < VALUE)[None, :])


@triton.jit
def norm(source, gain_ptr, target, epsilon, multiplier, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of one row: rounded before the gain and before the multiplier, as transformers does."""
    KIND: tl.constexpr = target.dtype.element_ty
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < SIZE, other=0.0).to(tl.float32)
    x = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon))).to(KIND)
    gain = tl.load(gain_ptr + i, mask=i < SIZE, other=0.0)
    x = (x.to(tl.float32) * gain.to(tl.float32)).to(KIND)
    tl.store(target + i, (x.to(tl.float32) * multiplier).to(KIND), mask=i < SIZE)


@triton.jit
def turn(
    source, target, cos, sin, i, there, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, IN_HALVES: tl.constexpr
):  # fmt: skip
    """Pairs i of a head, of one token or of a column of them."""
    low, high = pair_of(i, TURNING, TURNING, INTERLEAVED)
    first = tl.load(source + low, mask=there, other=0.0)
    second = tl.load(source + high, mask=there, other=0.0)
    c = tl.load(cos + i, mask=there, other=1.0)
    s = tl.load(sin + i, mask=there, other=0.0)
    low, high = pair_of(i, TURNING, TURNING, INTERLEAVED and not IN_HALVES)
    tl.store(target + low, turned(first, c, -second.to(tl.float32), s), mask=there)
    tl.store(target + high, turned(second, c, first.to(tl.float32), s), mask=there)
