"""Weights rounded to 8 or 4 bits in groups of 32 values, in GGUF's blocks and by its rules: others read them alike.

The counterpart of `blocks`, which decodes. Rounding changes the model: a quantised weight is another weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # values that share a scale


def encode_q8_0(values: Tensor) -> Tensor:
    """[N, K] float32 -> [N, bytes] uint8: symmetric, the largest value of a group becomes 127 or -127."""
    groups = values.reshape(-1, GROUP)
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    numbers = _rounded(groups * _inverse(scale)).to(torch.int8)
    return torch.cat([_half(scale), numbers.view(torch.uint8)], dim=1).reshape(len(values), -1)


def encode_q4_1(values: Tensor) -> Tensor:
    """[N, K] float32 -> [N, bytes] uint8: 16 steps from the lowest value of a group to the highest."""
    groups = values.reshape(-1, GROUP)
    lowest, highest = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = (highest - lowest) / 15
    numbers = ((groups - lowest) * _inverse(scale) + 0.5).clamp(0, 15).to(torch.uint8)
    packed = numbers[:, :16] | numbers[:, 16:] << 4
    return torch.cat([_half(scale), _half(lowest), packed], dim=1).reshape(len(values), -1)


def _inverse(scale: Tensor) -> Tensor:
    """Of the scale before it is stored in half precision, as GGUF has it; 0 for a group whose values are all alike."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def _rounded(x: Tensor) -> Tensor:
    """To the nearest whole number, halves away from zero (torch rounds them to even)."""
    whole = x.abs().floor()
    return x.sign() * (whole + (2 * (x.abs() - whole)).floor())


def _half(numbers: Tensor) -> Tensor:
    """[groups, 1] float32 -> [groups, 2] bytes of half precision."""
    return numbers.half().contiguous().view(torch.uint8)
