"""How weights are stored, by GGUF's names: plain floats, or blocks of 32 small integers that share a scale.

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
    30: BlockFormat("BF16", 1, 2, decode_bf16),
}
"""By the number GGUF gives each."""


def format_named(name: str) -> BlockFormat:
    """A format by its name."""
    return next(form for form in FORMATS.values() if form.name == name)
