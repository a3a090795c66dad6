"""Rows rounded by their own largest number, for products with weights that are rounded; see `math.scaled.rounded_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.math.scaled import Scheme

BLOCK = 4096  # numbers a program holds at a time


def round_rows(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[R, K] -> values [R, K] and scales [R] float32."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=scheme.values, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    round_kernel[(rows,)](
        out, scales, x, width, scheme.largest, BLOCK=block, FAST=x.device.type != "cpu",
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return out, scales


@triton.jit
def round_kernel(
    out_ptr,  # [R, K] int8 or float8
    scale_ptr,  # [R] float32
    x_ptr,  # [R, K]
    K,
    largest,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program a row, which it reads twice."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], dtype=tl.float32)
    odd = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, K, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(x))
        odd |= (x != x).to(tl.int32)  # a maximum passes over what is no number
    scale = tl.max(peak, 0) / largest
    scale = tl.where(tl.max(odd, 0) > 0, float("nan"), scale)
    tl.store(scale_ptr + row, scale)
    for begin in range(0, K, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * K + k, narrowed(x, scale, largest, out_ptr.dtype.element_ty, FAST), mask=k < K)


@triton.jit
def narrowed(x, scale, largest, KIND: tl.constexpr, FAST: tl.constexpr):
    """x / scale, rounded to even, as KIND."""
    parts = tl.where(scale > 0.0, tl.div_rn(x, scale), 0.0)
    parts = tl.minimum(tl.maximum(parts, -largest), largest)
    if KIND == tl.int8:
        # Whole numbers lie one apart between 2**23 and 2**24, so a sum there is rounded to one, halves to even.
        parts = (parts + 12582912.0) - 12582912.0
    elif not FAST:
        parts = rounded_to_e4m3(parts)  # the interpreter cuts off what a GPU rounds
    return parts.to(KIND)


@triton.jit
def rounded_to_e4m3(x):
    """To the nearest number with three bits behind the first, or to a multiple of 2**-9; halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal)
