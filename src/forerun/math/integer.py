"""Products of 8-bit integers: weights with one scale an output, activations with one scale a token (BASS's INT8).

Sums are exact, so every machine and every number of rows gives the same integers; two roundings remain, that of the
scales' product and that of the result. Quantising a weight changes the model, and so does rounding what it is
multiplied with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.math.blocks import BlockFormat

NAME = "I8"
SCALE = 4  # bytes: each row begins with its scale
STEPS = 127  # of the largest value, on either side of zero
NEGLIGIBLE = 2.0**-100
"""Rows whose values are all smaller count as zeros: the inverse of their scale would not fit float32."""


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] float32 -> whole numbers [.., K] from -127 to 127, int8, and a scale [.., 1]: the nearest, ties to even.

    A row with an infinity or NaN has zeros and the scale NaN: what is computed from it is not a number.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    steps = largest.new_tensor(STEPS)  # a number before the stroke would be multiplied with a rounded reciprocal
    inverse = torch.where(largest >= NEGLIGIBLE, steps / largest, 0.0)
    is_sound = largest.isfinite()
    numbers = torch.where(is_sound, x * inverse, 0.0)
    return numbers.round().to(torch.int8), torch.where(is_sound, largest / STEPS, torch.nan)


def integer_linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] float32 rounded, times numbers [N, K] int8 with scales [N] -> [.., N] float32."""
    steps, scale = rounded(x)
    sums = (steps.long() @ numbers.long().T).float()
    out = sums * (scale * scales)
    return out if bias is None else out + bias


def encode_rows(values: Tensor) -> Tensor:
    """[N, K] float32 -> [N, 4 + K] bytes: each row its scale (float32) and its numbers."""
    numbers, scale = rounded(values)
    return torch.cat([scale.contiguous().view(torch.uint8), numbers.view(torch.uint8)], dim=1)


def row_format(size: int) -> BlockFormat:
    """How rows of `size` values are stored: a row is one block."""

    def decode(raw: Tensor) -> Tensor:
        numbers, scales = parts(raw.view(-1, SCALE + size))
        return (scales[:, None] * numbers).flatten()

    return BlockFormat(NAME, size, SCALE + size, decode)


def parts(raw: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 4 + K] bytes -> numbers [N, K] int8 and scales [N] float32."""
    return raw[:, SCALE:].view(torch.int8), raw[:, :SCALE].contiguous().view(torch.float32)[:, 0]
