"""Products of more rows than a kernel of ours takes with weights that are rounded; `math.scaled.linear` refers."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.linear import project
from forerun.kernels.linear.rounding import round_rows
from forerun.kernels.linear.widen import nibbles
from forerun.math import scaled
from forerun.math.scaled import RoundedRows, RoundedWeight

ALIGNED = 16  # what both sizes of a weight must be a multiple of
BLOCK = 1024  # numbers a program takes
TWICE = 2 * project.ROWS[2]


def linear(x: Tensor | RoundedRows, weight: RoundedWeight, bias: Tensor | None) -> Tensor:
    """[R, K] -> [R, N]: 8-bit tensor cores where rows are rounded, else a product with a wide copy of the weight.

    Making that copy takes longer than reading the weight twice. torch's product of 8-bit floats writes bfloat16 alone:
    for models of a finer type it would round what passes of few rows do not, so they read the weight again and again.
    """
    is_finer = weight.scheme.values is torch.float8_e4m3fn and weight.dtype is not torch.bfloat16
    if is_finer or (isinstance(x, Tensor) and not weight.scheme.rounds_rows and len(x) <= TWICE):
        parts = _parts(x, project.ROWS[2])
        if project.why_not(parts[0], weight) is None:
            return torch.cat([project.project(part, weight, bias) for part in parts])
        if is_finer:
            return scaled.linear(x, weight.raw, weight.scales, weight.scheme, bias)
    if isinstance(x, Tensor) and not weight.scheme.rounds_rows:
        return F.linear(x, wide(weight), bias)
    if why_not_narrow(weight, weight.device):
        return scaled.linear(x, weight.raw, weight.scales, weight.scheme, bias)
    rows = round_rows(x, weight.scheme) if isinstance(x, Tensor) else x
    if weight.scheme.values is torch.int8:
        return scaled_sums(torch._int_mm(rows.values, weight.raw.T), rows.scales, weight.scales, bias, x.dtype)
    scales = weight.scales.float().T
    product = torch._scaled_mm(rows.values, weight.raw.T, rows.scales.unsqueeze(1), scales, out_dtype=torch.bfloat16)
    return product.to(x.dtype) if bias is None else (product + bias).to(x.dtype)


def _parts(x: Tensor | RoundedRows, count: int) -> list[Tensor] | list[RoundedRows]:
    if isinstance(x, Tensor):
        return list(x.split(count))
    return [RoundedRows(*part, x.dtype) for part in zip(x.values.split(count), x.scales.split(count), strict=True)]


def why_not_narrow(weight: RoundedWeight, place: torch.device) -> str | None:
    """Why torch has no 8-bit product for a weight; None where it has one."""
    if any(size % ALIGNED for size in weight.shape):
        return f"a weight of {weight.shape[0]} x {weight.shape[1]}, not multiples of {ALIGNED}"
    if weight.scheme.values is not torch.int8 and not has_fp8(place):
        return "8-bit floats need compute capability 9.0"
    return None


@cache
def has_fp8(place: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats with a scale for each row."""
    return place.type == "cuda" and torch.cuda.get_device_capability(place) >= (9, 0)


def wide(weight: RoundedWeight) -> Tensor:
    """A copy [N, K] of the model's type, one launch."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    rows, width = weight.raw.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    if not weight.scheme.is_packed:
        widen_kernel[grid](out, weight.raw, weight.scales, width, BLOCK=BLOCK)
        return out
    is_gpu = weight.device.type != "cpu"
    unpack_kernel[grid](out, weight.raw, weight.scales, width, GROUP=weight.scheme.group, FAST=is_gpu, BLOCK=BLOCK)
    return out


def scaled_sums(sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[R, N] int32 times the scales of rows [R] and of outputs [N, 1], and a bias [N]."""
    rows, outputs = sums.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    scale_kernel[(rows, triton.cdiv(outputs, BLOCK))](
        out, sums, row_scales, scales, scales if bias is None else bias, outputs, HAS_BIAS=bias is not None, BLOCK=BLOCK
    )
    return out


@triton.jit
def widen_kernel(
    out_ptr,  # [N, K]
    raw_ptr,  # [N, K] int8
    scale_ptr,  # [N]
    width,
    BLOCK: tl.constexpr,
):
    """One program per (weight row, block): torch's own product of two types takes several times as long."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(raw_ptr + row * width + k, mask=k < width, other=0).to(tl.float32)
    wide = raw * tl.load(scale_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + k, wide.to(out_ptr.dtype.element_ty), mask=k < width)


@triton.jit
def unpack_kernel(
    out_ptr,  # [N, K]
    raw_ptr,  # [N, K / 2] uint8
    scale_ptr,  # [N, K / GROUP]
    half,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (weight row, block of bytes)."""
    HALF: tl.constexpr = GROUP // 2
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < half
    low, high = nibbles(tl.load(raw_ptr + row * half + i, mask=there, other=0), tl.float32, FAST)
    scale = tl.load(scale_ptr + row * (half // HALF) + i // HALF, mask=there, other=0.0).to(tl.float32)
    place = out_ptr + row * 2 * half + i // HALF * GROUP + i % HALF
    tl.store(place, (low * scale).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(place + HALF, (high * scale).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def scale_kernel(
    out_ptr,  # [R, N]
    sums_ptr,  # [R, N] int32
    row_scale_ptr,  # [R] float32
    scale_ptr,  # [N]
    bias_ptr,  # [N]
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row, block of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < N
    scaled = tl.load(sums_ptr + row * N + n, mask=there, other=0).to(tl.float32) * tl.load(row_scale_ptr + row)
    scaled *= tl.load(scale_ptr + n, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        scaled += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, scaled.to(out_ptr.dtype.element_ty), mask=there)
