"""What stands between a layer's products, one launch each; the references are in `math.skinny`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import DTYPES, early
from forerun.kernels.linear.activation import activated
from forerun.kernels.linear.rounding import empty_rows, inverse_of, narrowed, rounded_to, scale_of
from forerun.math.scaled import RoundedRows, Scheme
from forerun.math.skinny import Activation, LayerNorm, Norm

LARGEST = 16384  # numbers of a row, which one program holds
BLOCK = 1024  # numbers a program gates


def normed(x: Tensor, norm: Norm | LayerNorm) -> Tensor:
    """[N, H] or [N, heads, D] -> the same shape, contiguous."""
    out = x.new_empty(x.shape)
    _launch(out, out, x, x, norm, None, 1.0, False)
    return out


def normed_and_rounded(x: Tensor, norm: Norm | LayerNorm, scheme: Scheme) -> RoundedRows:
    """The norm of each row [N, H], rounded as `rounding.round_rows` does."""
    rows = empty_rows(x, scheme)
    _launch(x, x, x, x, norm, None, 1.0, False, rows, scheme)
    return rows


def added_and_rounded(
    x: Tensor, change: Tensor, norm: Norm | LayerNorm, first: Norm | None, multiplier: float, scheme: Scheme
) -> tuple[Tensor, RoundedRows]:
    """`added` with a norm, of which the second result is rounded."""
    total, rows = x.new_empty(x.shape), empty_rows(x, scheme)
    _launch(x, total, x, change, norm, first, multiplier, True, rows, scheme)
    return total, rows


def added(
    x: Tensor,  # [N, H]
    change: Tensor,  # [N, H]
    norm: Norm | LayerNorm | None,
    first: Norm | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x + multiplier * first(change), and the norm of it; without a norm, the sum twice."""
    total = x.new_empty(x.shape)
    out = total if norm is None else x.new_empty(x.shape)
    _launch(out, total, x, change, norm, first, multiplier, True)
    return total, out


def gated(pairs: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """[N, 2 I] -> [N, I]: the first half activated, times the second."""
    size = pairs.shape[1] // 2
    out = pairs.new_empty(pairs.shape[0], size)
    gate_kernel[(pairs.shape[0], triton.cdiv(size, BLOCK))](
        out, pairs, size, ACTIVATION=int(activation), BLOCK=BLOCK, **early(pairs.device)
    )
    return out


def why_not(x: Tensor, *norms: Norm | LayerNorm | None) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if x.dtype not in DTYPES:
        return f"rows of {x.dtype}"
    if x.ndim not in (2, 3) or x.stride(-1) != 1:
        return "rows whose numbers do not lie side by side"
    if x.shape[-1] > LARGEST:
        return f"rows of {x.shape[-1]} numbers"
    for norm in norms:
        if norm is not None and (norm.weight.dtype != x.dtype or not norm.weight.is_contiguous()):
            return f"a gain of {norm.weight.dtype} that may not lie side by side"
    return None


def _launch(
    out: Tensor,
    total: Tensor,
    x: Tensor,
    change: Tensor,
    norm: Norm | LayerNorm | None,
    first: Norm | None,
    multiplier: float,
    adds: bool,
    rows: RoundedRows | None = None,
    scheme: Scheme | None = None,
) -> None:
    size, heads = x.shape[-1], 1 if x.ndim == 2 else x.shape[1]
    block = triton.next_power_of_2(size)
    after = norm or Norm(x, 0.0)
    before = first or Norm(x, 0.0)
    bias = after.bias if isinstance(after, LayerNorm) else None
    rounded = (x, x) if rows is None else (rows.values, rows.scales)
    norm_kernel[(x.shape[0], heads)](
        out, total, *rounded, x, change, after.weight, x if bias is None else bias, before.weight, x.stride(0),
        x.stride(1),
        size if after.weight.ndim == 2 else 0, after.epsilon, after.offset, before.epsilon, before.offset, multiplier,
        HEADS=heads, SIZE=size, BLOCK=block, ADDS=adds, HAS_NORM=norm is not None,
        CENTRED=isinstance(norm, LayerNorm), HAS_BIAS=bias is not None, WIDE=isinstance(after, LayerNorm) or after.wide,
        HAS_FIRST=first is not None, FIRST_WIDE=before.wide, num_warps=max(1, min(16, block // 512)),
        LARGEST=0.0 if scheme is None else scheme.largest, FAST=x.device.type != "cpu", **early(x.device),
    )  # fmt: skip


@triton.jit
def norm_kernel(
    out_ptr,  # [N, heads, D], where HAS_NORM and LARGEST is 0
    total_ptr,  # [N, D], where ADDS
    rounded_ptr,  # [N, D], where HAS_NORM and LARGEST is not 0
    row_scale_ptr,  # [N] float32, then as well
    x_ptr,  # [N, heads, D]
    change_ptr,  # [N, D], where ADDS
    gain_ptr,  # [D] or [heads, D]
    bias_ptr,  # [D], where HAS_BIAS
    first_gain_ptr,  # [D], where HAS_FIRST
    x_token,
    x_head,
    gain_head,
    epsilon,
    offset,
    first_epsilon,
    first_offset,
    multiplier,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    FIRST_WIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (token, head), rounded where torch rounds."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    there = d < SIZE
    x = tl.load(x_ptr + token * x_token + head * x_head + d, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        change = tl.load(change_ptr + token * SIZE + d, mask=there, other=0.0).to(tl.float32)
        if HAS_FIRST:
            gain = tl.load(first_gain_ptr + d, mask=there, other=0.0).to(tl.float32) + first_offset
            change *= 1.0 / tl.sqrt(tl.sum(change * change, 0) / SIZE + first_epsilon)
            change = scaled(change, gain, KIND, FIRST_WIDE).to(KIND).to(tl.float32)
        x += multiplier * change
        rounded = x.to(KIND)
        tl.store(total_ptr + token * SIZE + d, rounded, mask=there)
        x = rounded.to(tl.float32)
    if HAS_NORM:
        gain = tl.load(gain_ptr + head * gain_head + d, mask=there, other=0.0).to(tl.float32) + offset
        if CENTRED:
            gain = gain.to(gain_ptr.dtype.element_ty).to(tl.float32)
            x = tl.where(there, x - tl.sum(x, 0) / SIZE, 0.0)
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon)
        x = scaled(x, gain, KIND, WIDE)
        if HAS_BIAS:
            x += tl.load(bias_ptr + d, mask=there, other=0.0).to(tl.float32)
        if LARGEST > 0:
            x = tl.where(there, rounded_to(x, KIND, FAST), 0.0)
            scale = scale_of(tl.max(tl.abs(x), 0), tl.max((x != x).to(tl.int32), 0), LARGEST)
            numbers = narrowed(x, scale, inverse_of(scale), LARGEST, rounded_ptr.dtype.element_ty, FAST)
            tl.store(rounded_ptr + token * SIZE + d, numbers, mask=there)
            tl.store(row_scale_ptr + token, scale)
        else:
            tl.store(out_ptr + (token * HEADS + head) * SIZE + d, x.to(KIND), mask=there)


@triton.jit
def scaled(x, gain, KIND: tl.constexpr, WIDE: tl.constexpr):
    if not WIDE:
        x = x.to(KIND).to(tl.float32)
    return x * gain


@triton.jit
def gate_kernel(
    out_ptr,  # [N, I]
    pairs_ptr,  # [N, 2 I]
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (token, block)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    first = tl.load(pairs_ptr + token * 2 * size + i, mask=there, other=0.0).to(tl.float32)
    second = tl.load(pairs_ptr + token * 2 * size + size + i, mask=there, other=0.0).to(tl.float32)
    result = activated(first, ACTIVATION) * second
    tl.store(out_ptr + token * size + i, result.to(out_ptr.dtype.element_ty), mask=there)
