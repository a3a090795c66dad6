"""Rows rounded by their own largest number, for rounded weights; the reference is `math.scaled.rounded_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import early
from forerun.math.scaled import RoundedRows, Scheme

BLOCK = 16384  # numbers a program holds at a time: as a rule the whole row


def empty_rows(x: Tensor, scheme: Scheme) -> RoundedRows:
    """Room for the rows of x [R, K]."""
    values = torch.empty(x.shape, dtype=scheme.values, device=x.device)
    return RoundedRows(values, torch.empty(len(x), dtype=torch.float32, device=x.device), x.dtype)


def round_rows(x: Tensor, scheme: Scheme) -> RoundedRows:
    """[R, K], each row by its own scale."""
    (rows, width), rounded = x.shape, empty_rows(x, scheme)
    block = min(BLOCK, triton.next_power_of_2(width))
    round_kernel[(rows,)](
        rounded.values, rounded.scales, x, width, scheme.largest, BLOCK=block, FAST=x.device.type != "cpu",
        num_warps=max(1, min(16, block // 512)), **early(x.device),
    )  # fmt: skip
    return rounded


@triton.jit
def round_kernel(
    out_ptr,  # [R, K] int8 or float8
    scale_ptr,  # [R] float32
    x_ptr,  # [R, K]
    K,
    largest,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row, which it holds in registers where that is possible."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    odd = tl.max((x != x).to(tl.int32), 0)
    for begin in range(BLOCK, K, BLOCK):
        more = tl.load(x_ptr + row * K + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(more), 0))
        odd = tl.maximum(odd, tl.max((more != more).to(tl.int32), 0))
    scale = scale_of(peak, odd, largest)
    inverse = inverse_of(scale)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * K + k, narrowed(x, scale, inverse, largest, KIND, FAST), mask=k < K)
    for begin in range(BLOCK, K, BLOCK):
        more = tl.load(x_ptr + row * K + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * K + begin + k, narrowed(more, scale, inverse, largest, KIND, FAST), mask=begin + k < K)


@triton.jit
def scale_of(peak, odd, largest):
    """Of numbers whose largest is `peak`; a maximum passes over what is no number, so `odd` counts that."""
    return tl.where(odd > 0, float("nan"), tl.div_rn(peak, tl.zeros_like(peak) + largest))


@triton.jit
def inverse_of(scale):
    """What `narrowed` multiplies with first; of a scale that is next to nothing as much as a float holds."""
    return tl.minimum(tl.div_rn(scale * 0.0 + 1.0, scale), 1e38)


@triton.jit
def narrowed(x, scale, inverse, largest, KIND: tl.constexpr, FAST: tl.constexpr):
    """x / scale, rounded to even, as KIND: two corrections make a product with the inverse what a division gives."""
    if FAST:
        parts = x * inverse
        parts = tl.fma(tl.fma(-parts, scale, x), inverse, parts)
    else:  # the interpreter rounds between
        parts = tl.where(scale > 0.0, tl.div_rn(x, scale), 0.0)
    return as_kind(parts, largest, KIND, FAST)


@triton.jit
def as_kind(parts, largest, KIND: tl.constexpr, FAST: tl.constexpr):
    parts = tl.minimum(tl.maximum(parts, -largest), largest)
    if tl.int8 == KIND:
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


@triton.jit
def rounded_to(x, KIND: tl.constexpr, FAST: tl.constexpr):
    """float32 -> float32, rounded as KIND is. A GPU makes one bfloat16 at an eighth of the speed of two."""
    if FAST and tl.bfloat16 == KIND:
        x = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 t;
                cvt.rn.bf16x2.f32 t, $3, $2;
                shl.b32 $0, t, 16;
                and.b32 $1, t, 0xffff0000;
            }
            """,
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = x.to(KIND).to(tl.float32)
    return x
