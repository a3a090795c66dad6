"""A mixture of experts for a few rows in Triton; the reference is `math.experts`.

(Row, expert) pairs come sorted by expert, and a program belongs to a chosen expert and a tile of its outputs: it reads
those weights once for all rows that chose the expert. Nothing waits for the host, so a CUDA graph can hold it.
The parts of a row are added in the order of its router, always the same.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import DTYPES, multiprocessors, needs_upcast
from forerun.kernels.linear.activation import activated
from forerun.kernels.linear.routing import Routed
from forerun.math.experts import SWIGLU_LIMIT, SWIGLU_SLOPE, ExpertWeights

MOST_ROWS = 64  # beyond it a library's grouped product is faster
ROWS = (16, 64)  # pairs of an expert that are multiplied at once, at least and at most: more read its weights again
BLOCK_N, BLOCK_K, WARPS = 32, 128, 4
BLOCK_SUM = 1024
CROWDED = 4  # programs a multiprocessor
CLAMPED = tl.constexpr(-1)  # in the place of an activation
LIMIT, SLOPE = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_SLOPE)


def run_experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """[N, H] -> [N, H]: the sum over a row's experts of share * second(gated(first(x)))."""
    (rows, width), most = x.shape, routed.most
    inner, tiles = weights.second.shape[2], partial(_tile, len(routed.active), x.device)
    inner_states = x.new_empty(rows * most, inner)
    parts = torch.empty(rows * most, width, dtype=torch.float32, device=x.device)
    at_once = min(max(ROWS[0], triton.next_power_of_2(2 * rows * most // len(weights.first))), ROWS[1])
    is_alone = rows == 1 and routed.is_distinct
    how = {"ROWS": at_once, "BLOCK_K": BLOCK_K, "UPCAST": needs_upcast(x), "ALONE": is_alone, "num_warps": WARPS}
    activation = -1 if weights.activation is None else int(weights.activation)
    bias, block = weights.first_bias, tiles(inner)
    first_kernel[(len(routed.active), triton.cdiv(inner, block))](
        inner_states, x, weights.first, x if bias is None else bias, routed.active, routed.pairs, routed.ends, most,
        inner, width, ACTIVATION=activation, IN_TURNS=weights.in_turns, HAS_BIAS=bias is not None, BLOCK_N=block, **how,
    )  # fmt: skip
    bias, block = weights.second_bias, tiles(width)
    second_kernel[(len(routed.active), triton.cdiv(width, block))](
        parts, inner_states, weights.second, x if bias is None else bias, routed.shares, routed.active, routed.pairs,
        routed.ends, width, inner, HAS_BIAS=bias is not None, BLOCK_N=block, **how,
    )  # fmt: skip
    out = torch.empty_like(x)
    sum_kernel[(rows, triton.cdiv(width, BLOCK_SUM))](out, parts, width, MOST=most, BLOCK=BLOCK_SUM)
    return out


def _tile(experts: int, place: torch.device, outputs: int) -> int:
    """Outputs of a program: few where there would be too few programs to give every multiprocessor the same."""
    return BLOCK_N if experts * outputs >= CROWDED * BLOCK_N * multiprocessors(place) else BLOCK_N // 2


def why_not(x: Tensor, weights: ExpertWeights) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything."""
    if not 0 < len(x) <= MOST_ROWS:
        return f"{len(x)} rows, more than {MOST_ROWS}"
    tensors = (x, weights.first, weights.second)
    if x.dtype not in DTYPES or any(t.dtype != x.dtype or not t.is_contiguous() for t in tensors):
        return "weights of another type than the rows, or that do not lie side by side"
    return None


@triton.jit
def first_kernel(
    out_ptr,  # [P, I] of the pairs as they are sorted
    x_ptr,  # [N, H]
    w_ptr,  # [E, 2 I, H]
    bias_ptr,  # [E, 2 I]
    active_ptr,  # experts that somebody chose, or -1
    pairs_ptr,  # [P] int32: row * most + place, sorted by expert
    ends_ptr,  # [E + 1] int32
    most,
    N,
    K,
    ACTIVATION: tl.constexpr,
    IN_TURNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    ALONE: tl.constexpr,
):
    """One program per (expert, tile of outputs)."""
    expert = tl.load(active_ptr + tl.program_id(0))
    if expert < 0:
        return
    if ALONE:  # one row, no expert twice: nothing to look up before weights can be asked for
        begin = tl.program_id(0)
        end = begin + 1
    else:
        begin = tl.load(ends_ptr + expert)
        end = tl.load(ends_ptr + expert + 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < N
    gate = tl.minimum(n, N - 1)
    up = gate + N
    if IN_TURNS:
        gate = 2 * gate
        up = gate + 1
    base = w_ptr + expert.to(tl.int64) * 2 * N * K
    for start in range(begin, end, ROWS):
        p = start + tl.arange(0, ROWS)
        if ALONE:
            row = p * 0
        else:
            row = tl.load(pairs_ptr + p, mask=p < end, other=0) // most
        first = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        second = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=(p < end)[:, None] & (k < K)[None, :], other=0.0)
            g = tl.load(base + gate[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            u = tl.load(base + up[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                g = g.to(tl.float32)
                u = u.to(tl.float32)
            first = tl.dot(g, tl.trans(x), first, input_precision="ieee")
            second = tl.dot(u, tl.trans(x), second, input_precision="ieee")
        if HAS_BIAS:
            first += tl.load(bias_ptr + expert * 2 * N + gate).to(tl.float32)[:, None]
            second += tl.load(bias_ptr + expert * 2 * N + up).to(tl.float32)[:, None]
        if ACTIVATION == CLAMPED:
            first = tl.minimum(first, LIMIT)
            second = tl.minimum(tl.maximum(second, -LIMIT), LIMIT) + 1.0
            first = first / (1.0 + tl.exp(-SLOPE * first))
        else:
            first = activated(first, ACTIVATION)
        place = out_ptr + p[None, :].to(tl.int64) * N + n[:, None]
        tl.store(place, (first * second).to(out_ptr.dtype.element_ty), mask=there[:, None] & (p < end)[None, :])


@triton.jit
def second_kernel(
    out_ptr,  # [P, H] float32, of the pairs in the order of rows
    x_ptr,  # [P, I] of the pairs as they are sorted
    w_ptr,  # [E, H, I]
    bias_ptr,  # [E, H]
    shares_ptr,  # [P] in the order of rows
    active_ptr,
    pairs_ptr,  # [P] int32
    ends_ptr,  # [E + 1] int32
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    ALONE: tl.constexpr,
):
    """One program per (expert, tile of outputs)."""
    expert = tl.load(active_ptr + tl.program_id(0))
    if expert < 0:
        return
    if ALONE:  # one row, no expert twice: nothing to look up before weights can be asked for
        begin = tl.program_id(0)
        end = begin + 1
    else:
        begin = tl.load(ends_ptr + expert)
        end = tl.load(ends_ptr + expert + 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < N
    row = tl.minimum(n, N - 1)
    base = w_ptr + expert.to(tl.int64) * N * K
    for start in range(begin, end, ROWS):
        p = start + tl.arange(0, ROWS)
        total = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + p[:, None] * K + k[None, :], mask=(p < end)[:, None] & (k < K)[None, :], other=0.0)
            w = tl.load(base + row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert * N + row).to(tl.float32)[:, None]
        pair = tl.load(pairs_ptr + p, mask=p < end, other=0)
        total *= tl.load(shares_ptr + pair, mask=p < end, other=0.0).to(tl.float32)[None, :]
        place = out_ptr + pair[None, :].to(tl.int64) * N + n[:, None]
        tl.store(place, total, mask=there[:, None] & (p < end)[None, :])


@triton.jit
def sum_kernel(out_ptr, parts_ptr, N, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """[N, k, H] float32 -> [N, H], one program per (row, tile), in the order of places."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(MOST):
        total += tl.load(parts_ptr + (row * MOST + place) * N + n, mask=n < N, other=0.0)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
