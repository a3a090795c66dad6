"""A round's random numbers in one launch; the reference is `math.random`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.philox import uniform
from forerun.math.random import RandomStream
from forerun.math.verify import Noise
from forerun.types import Keys, Rule

SMALLEST = 32  # numbers that a variant is compiled for: one for each thread of a warp
KEYS = ("seed_ptr", "request_ptr", "round_ptr", "position_ptr", "out_ptr")


def draft_uniforms(keys: Keys, width: int, rule: object) -> Tensor:
    """The numbers a drafter draws its tokens with: [B, width] float64."""
    return _uniforms(keys, width, RandomStream.TARGET if rule is Rule.COUPLED else RandomStream.DRAFT)


def noise(keys: Keys, width: int) -> Noise:
    """What a draft of `width` tokens is verified with under the token rule; see `math.verify.noise_of`."""
    return Noise(_uniforms(keys, width, RandomStream.ACCEPT), _uniforms(keys, width + 1, RandomStream.FINAL))


def _uniforms(keys: Keys, width: int, stream: RandomStream) -> Tensor:
    """Positions 0 .. width - 1 of one stream: [B, width] float64."""
    rows = keys.seed.shape[0]
    out = keys.seed.new_empty(rows, width, dtype=torch.float64)
    block = max(SMALLEST, triton.next_power_of_2(width))
    _uniforms_kernel[(rows,)](
        keys.seed, keys.request_id, keys.round, keys.position, out, width,
        STREAM=int(stream), ABSOLUTE=stream is RandomStream.TARGET, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("width",), do_not_specialize_on_alignment=KEYS)
def _uniforms_kernel(
    seed_ptr, request_ptr, round_ptr, position_ptr,  # [B] int64
    out_ptr,  # [B, width] float64
    width,
    STREAM: tl.constexpr, ABSOLUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. Numbers of an absolute stream belong to a place in the text, those of others to a round."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK).to(tl.int64)
    turn = tl.load(round_ptr + row)
    if ABSOLUTE:
        i += tl.load(position_ptr + row)
        turn = turn * 0
    numbers = uniform(tl.load(seed_ptr + row), tl.load(request_ptr + row), turn, i, STREAM)
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * width + column, numbers, mask=column < width)
