"""What stands between a layer's products, one launch each; the references are in `math.skinny`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.math.skinny import LayerNorm, Norm

LARGEST = 16384  # numbers of a row, which one program holds
BLOCK = 1024  # numbers a program gates


def normed(x: Tensor, norm: Norm | LayerNorm) -> Tensor:
    """[N, H] or [N, heads, D] -> the same shape, contiguous."""
    out, heads = x.new_empty(x.shape), 1 if x.ndim == 2 else x.shape[1]
    _launch(out, out, x, x, norm, heads, False)
    return out


def added(x: Tensor, change: Tensor, norm: Norm | LayerNorm) -> tuple[Tensor, Tensor]:
    """[N, H] each -> their sum, and the norm of it."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(out, total, x, change, norm, 1, True)
    return total, out


def gated(pairs: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]: silu of the first half, times the second."""
    size = pairs.shape[1] // 2
    out = pairs.new_empty(pairs.shape[0], size)
    gate_kernel[(pairs.shape[0], triton.cdiv(size, BLOCK))](out, pairs, size, BLOCK=BLOCK)
    return out


def why_not(x: Tensor, norm: Norm | LayerNorm) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if x.ndim not in (2, 3) or x.stride(-1) != 1 or not norm.weight.is_contiguous():
        return "rows whose numbers do not lie side by side"
    if x.shape[-1] > LARGEST or norm.weight.dtype != x.dtype:
        return f"rows of {x.shape[-1]} numbers, a gain of {norm.weight.dtype}"
    return None


def _launch(
    out: Tensor, total: Tensor, x: Tensor, change: Tensor, norm: Norm | LayerNorm, heads: int, adds: bool
) -> None:
    size, is_centred = x.shape[-1], isinstance(norm, LayerNorm)
    block = triton.next_power_of_2(size)
    norm_kernel[(x.shape[0], heads)](
        out, total, x, change, norm.weight, norm.bias if isinstance(norm, LayerNorm) else norm.weight, x.stride(0),
        x.stride(1), norm.epsilon, HEADS=heads, SIZE=size, BLOCK=block, ADDS=adds, CENTRED=is_centred,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip


@triton.jit
def norm_kernel(
    out_ptr,  # [N, heads, D]
    total_ptr,  # [N, D], where ADDS
    x_ptr,  # [N, heads, D]
    change_ptr,  # [N, D], where ADDS
    gain_ptr,  # [D]
    bias_ptr,  # [D], where CENTRED
    x_token,
    x_head,
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """One program per (token, head), rounded where torch rounds."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    there = d < SIZE
    gain = tl.load(gain_ptr + d, mask=there, other=0.0)
    x = tl.load(x_ptr + token * x_token + head * x_head + d, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(change_ptr + token * SIZE + d, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(gain.dtype)
        tl.store(total_ptr + token * SIZE + d, rounded, mask=there)
        x = rounded.to(tl.float32)
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / SIZE, 0.0)
    shrink = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    if CENTRED:
        bias = tl.load(bias_ptr + d, mask=there, other=0.0).to(tl.float32)
        result = x * shrink * gain.to(tl.float32) + bias
    else:
        result = (x * shrink).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out_ptr + (token * HEADS + head) * SIZE + d, result.to(gain.dtype), mask=there)


@triton.jit
def gate_kernel(
    out_ptr,  # [N, I]
    pairs_ptr,  # [N, 2 I]
    size,
    BLOCK: tl.constexpr,
):
    """One program per (token, block)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    first = tl.load(pairs_ptr + token * 2 * size + i, mask=there, other=0.0).to(tl.float32)
    second = tl.load(pairs_ptr + token * 2 * size + size + i, mask=there, other=0.0).to(tl.float32)
    result = first / (1.0 + tl.exp(-first)) * second
    tl.store(out_ptr + token * size + i, result.to(out_ptr.dtype.element_ty), mask=there)
