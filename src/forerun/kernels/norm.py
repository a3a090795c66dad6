"""Division by the root of the mean square, one launch; the reference is `math.skinny.normed`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.launching import starts_early
from forerun.math.skinny import Norm

LARGEST = 16384  # numbers of a row, which one program holds


def normed(x: Tensor, norm: Norm) -> Tensor:
    """[N, H] or [N, heads, D] -> the same shape, contiguous."""
    out, early = x.new_empty(x.shape), starts_early(x.device)
    heads, size = (1 if x.ndim == 2 else x.shape[1]), x.shape[-1]
    block = triton.next_power_of_2(size)
    norm_kernel[(x.shape[0], heads)](
        out, x, norm.weight, x.stride(0), x.stride(1), norm.epsilon, HEADS=heads, SIZE=size, BLOCK=block, EARLY=early,
        num_warps=max(1, min(16, block // 512)), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def why_not(x: Tensor, norm: Norm) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if x.ndim not in (2, 3) or x.stride(-1) != 1 or not norm.weight.is_contiguous():
        return "rows whose numbers do not lie side by side"
    if x.shape[-1] > LARGEST or norm.weight.dtype != x.dtype:
        return f"rows of {x.shape[-1]} numbers, a gain of {norm.weight.dtype}"
    return None


@triton.jit
def norm_kernel(
    out_ptr,  # [N, heads, D]
    x_ptr,  # [N, heads, D]
    gain_ptr,  # [D]
    x_token,
    x_head,
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (token, head), rounded where torch rounds."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    there = d < SIZE
    gain = tl.load(gain_ptr + d, mask=there, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_token + head * x_head + d, mask=there, other=0.0).to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    made = (x * shrink).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out_ptr + (token * HEADS + head) * SIZE + d, made.to(gain.dtype), mask=there)
