"""A mixture of experts for a few rows in Triton; the reference is `math.experts`.

(Row, expert) pairs are sorted by expert on the device, and a program belongs to an expert and a tile of its outputs: it
reads those weights once for all rows that chose the expert, or ends at once where none did. Nothing waits for the host,
so a CUDA graph can hold it. The parts of a row are added in the order of its router, always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import DTYPES, needs_upcast
from forerun.kernels.linear.activation import activated
from forerun.math.experts import SWIGLU_LIMIT, SWIGLU_SLOPE, ExpertWeights

MOST_ROWS = 64  # beyond it a library's grouped product is faster
ROWS = 16  # pairs of an expert that are multiplied at once
BLOCK_N, BLOCK_K = 32, 128
CLAMPED = tl.constexpr(-1)  # in the place of an activation
LIMIT, SLOPE = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_SLOPE)


def run_experts(
    x: Tensor,  # [N, H]
    chosen: Tensor,  # [N, k] int64
    shares: Tensor,  # [N, k]
    weights: ExpertWeights,
) -> Tensor:  # [N, H]
    """The sum over a row's experts of share * second(gated(first(x)))."""
    (rows, most), width = chosen.shape, x.shape[1]
    count, inner = weights.first.shape[0], weights.second.shape[2]
    experts, pairs = chosen.flatten().sort(stable=True)
    places = torch.arange(count + 1, device=x.device)
    ends = torch.searchsorted(experts, places).to(torch.int32)  # [E + 1], where each expert's pairs begin
    made = x.new_empty(rows * most, inner)
    parts = torch.empty(rows * most, width, dtype=torch.float32, device=x.device)
    how = {"ROWS": ROWS, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "UPCAST": needs_upcast(x), "num_warps": 4}
    activation = -1 if weights.activation is None else int(weights.activation)
    bias = weights.first_bias
    first_kernel[(count, triton.cdiv(inner, BLOCK_N))](
        made, x, weights.first, x if bias is None else bias, pairs, ends, most, inner, width,
        ACTIVATION=activation, IN_TURNS=weights.in_turns, HAS_BIAS=bias is not None, **how,
    )  # fmt: skip
    bias = weights.second_bias
    second_kernel[(count, triton.cdiv(width, BLOCK_N))](
        parts, made, weights.second, x if bias is None else bias, shares.flatten(), pairs, ends, width, inner,
        HAS_BIAS=bias is not None, **how,
    )  # fmt: skip
    return parts.view(rows, most, width).sum(1).to(x.dtype)


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
    pairs_ptr,  # [P] int64: row * most + place, sorted by expert
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
):
    """One program per (expert, tile of outputs)."""
    expert = tl.program_id(0)
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
    pairs_ptr,  # [P] int64
    ends_ptr,  # [E + 1] int32
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per (expert, tile of outputs)."""
    expert = tl.program_id(0)
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
        place = out_ptr + pair[None, :] * N + n[:, None]
        tl.store(place, total, mask=there[:, None] & (p < end)[None, :])
