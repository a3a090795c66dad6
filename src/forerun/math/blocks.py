"""How weights are stored, by GGUF's names: plain floats, or blocks of 32 small integers that share a scale.

The K formats have blocks of 256 in groups of 32 or 16, whose scales are small integers themselves, times one of the
block.

The arithmetic is float32, multiply then add, as in every other reader of these files: results agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to write a run of values."""

    name: str
    values: int  # in a block
    size: int  # bytes of a block
    decode: Callable[[Tensor], Tensor]  # [bytes] uint8 -> [values] float32


def decode_f32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32).clone()


def decode_f16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16).float()


def decode_bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).float()


def decode_q8_0(raw: Tensor) -> Tensor:
    """A scale (float16), then 32 signed bytes."""
    block = raw.view(-1, 34)
    return (_half(block[:, :2]) * block[:, 2:].view(torch.int8)).flatten()


def decode_q4_0(raw: Tensor) -> Tensor:
    """A scale, then 32 half-bytes that stand for -8 .. 7."""
    block = raw.view(-1, 18)
    return (_half(block[:, :2]) * (_half_bytes(block[:, 2:]) - 8)).flatten()


def decode_q4_1(raw: Tensor) -> Tensor:
    """A scale, the lowest value, then 32 half-bytes that count up from it."""
    block = raw.view(-1, 20)
    return (_half(block[:, :2]) * _half_bytes(block[:, 4:]) + _half(block[:, 2:4])).flatten()


def decode_q4_k(raw: Tensor) -> Tensor:
    """Two scales, 8 x 2 six-bit numbers that say each group's scale and depth, then 256 half-bytes."""
    block = raw.view(-1, 144)
    return _scaled_groups(block, _k_half_bytes(block[:, 16:]))


def decode_q5_k(raw: Tensor) -> Tensor:
    """As Q4_K, with a fifth bit of each value: bit g of 32 bytes is for group g."""
    block = raw.view(-1, 176)
    fifth = block[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _scaled_groups(block, _k_half_bytes(block[:, 48:]) + 16 * fifth)


def decode_q6_k(raw: Tensor) -> Tensor:
    """256 half-bytes, the upper two bits of each value, 16 signed scales, one of the block. Values from -32 to 31."""
    block = raw.view(-1, 210)
    low, shifts = block[:, :128].view(-1, 2, 1, 64), torch.tensor([0, 4], dtype=torch.uint8)[:, None]
    low = (low >> shifts & 15).reshape(-1, 2, 4, 32)
    high = block[:, 128:192].view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    values = (low + 16 * high).float().view(-1, 16, 16) - 32
    scales = _half(block[:, 208:]) * block[:, 192:208].view(torch.int8)
    return (scales.unsqueeze(2) * values).flatten()


def _scaled_groups(block: Tensor, values: Tensor) -> Tensor:
    """[blocks, 8, 32] values of Q4_K and Q5_K: each group's scale times them, less its depth."""
    first, second, mixed = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, mixed & 15 | first >> 6 << 4], dim=1)
    depths = torch.cat([second & 63, mixed >> 4 | second >> 6 << 4], dim=1)
    scale, depth = _half(block[:, :2]) * scales, _half(block[:, 2:4]) * depths
    return (scale.unsqueeze(2) * values - depth.unsqueeze(2)).flatten()


def _k_half_bytes(packed: Tensor) -> Tensor:
    """[blocks, 128] bytes -> [blocks, 8, 32]: of each 32 bytes the low halves, then the high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return torch.cat([runs & 15, runs >> 4], dim=2).view(-1, 8, 32)


def _half(pairs: Tensor) -> Tensor:
    """[blocks, 2] bytes -> [blocks, 1] float32."""
    return pairs.contiguous().view(torch.float16).float()


def _half_bytes(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves are the first sixteen values, the high halves the others."""
    return torch.cat([packed & 15, packed >> 4], dim=1).float()


FORMATS = {
    0: BlockFormat("F32", 1, 4, decode_f32),
    1: BlockFormat("F16", 1, 2, decode_f16),
    2: BlockFormat("Q4_0", 32, 18, decode_q4_0),
    3: BlockFormat("Q4_1", 32, 20, decode_q4_1),
    8: BlockFormat("Q8_0", 32, 34, decode_q8_0),
    12: BlockFormat("Q4_K", 256, 144, decode_q4_k),
    13: BlockFormat("Q5_K", 256, 176, decode_q5_k),
    14: BlockFormat("Q6_K", 256, 210, decode_q6_k),
    30: BlockFormat("BF16", 1, 2, decode_bf16),
}
"""By the number GGUF gives each."""


def format_named(name: str) -> BlockFormat:
    """A format by its name."""
    return next(form for form in FORMATS.values() if form.name == name)
