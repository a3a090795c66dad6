"""Weights rounded to 8 or 4 bits with a scale for each output, or for each group of its inputs; products with them.

A product's rows stay as they are (weights only), or every row is rounded as well, by its own largest number, so that
whole numbers or 8-bit floats are multiplied. Either way a row's result depends on that row alone. Scales are of the
model's own type and rounded before the weights are divided by them: what is stored is exactly what is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPS = (128, 64, 32)  # inputs that share a scale of four bits: the largest that divides them


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are rounded, and whether a product's rows are."""

    name: str
    values: torch.dtype  # uint8: two numbers a byte, see `packed`
    largest: float  # what the largest weight of a scale becomes
    bounds: tuple[float, float]  # of numbers that can be stored
    group: int = 0  # inputs that share a scale; 0: all inputs of an output do
    rounds_rows: bool = False

    @property
    def is_packed(self) -> bool:
        return self.values is torch.uint8

    def fitted(self, *sizes: int) -> Scheme | None:
        """The scheme for weights of so many inputs; None where no group divides all of them."""
        if not self.is_packed:
            return self
        group = next((group for group in GROUPS if all(size % group == 0 for size in sizes)), None)
        return None if group is None else replace(self, group=group)


INT8 = Scheme("int8", torch.int8, 127.0, (-127.0, 127.0))
W8A8 = Scheme("w8a8", torch.int8, 127.0, (-127.0, 127.0), rounds_rows=True)
FP8 = Scheme("fp8", torch.float8_e4m3fn, 448.0, (-448.0, 448.0), rounds_rows=True)
INT4 = Scheme("int4", torch.uint8, 7.5, (-8.0, 7.0), group=GROUPS[0])
SCHEMES = {scheme.name: scheme for scheme in (INT8, W8A8, FP8, INT4)}


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows as a product with rounded weights takes them."""

    values: Tensor  # [R, K] of the scheme's type
    scales: Tensor  # [R] float32
    dtype: torch.dtype  # of the rows before, and of products with them

    def __len__(self) -> int:
        return len(self.values)


class RoundedWeight(Tensor):
    """[N, K] values of the model's type, stored as `raw * scales`."""

    raw: Tensor  # [N, K] int8 or float8_e4m3fn, [N, K / 2] uint8
    scales: Tensor  # [N, groups], of the model's type or wider
    scheme: Scheme

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> Self:
        shape = values.shape[0], values.shape[1] * (2 if scheme.is_packed else 1)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or scales.dtype, device=values.device)

    def __init__(self, values: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> None:
        assert values.dtype == scheme.values and len(values) == len(scales)
        self.raw, self.scales, self.scheme = values, scales, scheme

    def dense(self) -> Tensor:
        """A copy of the model's type; products do not round it like this."""
        return dense(self.raw, self.scales, self.scheme).to(self.dtype)

    def with_tensors(self, values: Tensor, scales: Tensor) -> Self:
        return type(self)(values, scales, self.scheme, self.dtype)

    @property
    def num_bytes(self) -> int:
        """That a product reads."""
        return self.raw.nbytes + self.scales.nbytes


def rounded_weight(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[N, K] -> values [N, K] ([N, K / 2] of four bits) and scales [N, groups] of `dtype`.

    Halves are rounded to even; a weight whose group is all zeros, or too small for its scale, becomes 0.
    """
    groups = weight.float().unflatten(1, (-1, scheme.group or weight.shape[1]))
    scales = _scales(groups, scheme).to(dtype)
    numbers = _divided(groups, scales.float().unsqueeze(2), scheme).flatten(1)
    if scheme.is_packed:
        return packed((numbers + 8).to(torch.uint8), scheme.group), scales
    return numbers.to(scheme.values), scales


def rounded_rows(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[.., K] -> values [.., K] and scales [..] float32. A row that is not finite has a scale that is not."""
    wide = x.float()
    scales = _scales(wide, scheme)
    return _divided(wide, scales.unsqueeze(-1), scheme).to(scheme.values), scales


def _scales(numbers: Tensor, scheme: Scheme) -> Tensor:
    """[.., K] -> [..]. torch multiplies by the reciprocal of a number on a GPU, which may be off by a bit."""
    largest = numbers.abs().amax(-1)
    return largest / torch.full_like(largest, scheme.largest)


def _divided(numbers: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Numbers that the scheme's type can hold, as float32."""
    parts = torch.where(scales > 0, numbers / scales, 0.0).clamp(*scheme.bounds)
    return parts if scheme.values.is_floating_point else parts.round()


def packed(numbers: Tensor, group: int) -> Tensor:
    """[N, K] below 16 -> [N, K / 2] bytes: the first half of a group in the low bits, the second in the high ones."""
    first, second = numbers.unflatten(1, (-1, 2, group // 2)).unbind(2)
    raw: Tensor = (first | second << 4).flatten(1)
    return raw


def unpacked(raw: Tensor, group: int) -> Tensor:
    """The other way round."""
    halves = raw.unflatten(1, (-1, group // 2))
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, which does not know all narrow types everywhere."""
    if parts[0].itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def whole_numbers(values: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] float32: the stored numbers before they are scaled."""
    return unpacked(values, scheme.group).float() - 8 if scheme.is_packed else values.float()


def dense(values: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] float32."""
    numbers = whole_numbers(values, scheme)
    wide: Tensor = (numbers.unflatten(1, (scales.shape[1], -1)) * scales.float().unsqueeze(2)).flatten(1)
    return wide


def linear(
    x: Tensor | RoundedRows, values: Tensor, scales: Tensor, scheme: Scheme, bias: Tensor | None = None
) -> Tensor:
    """[.., K] -> [.., N] of x's type: sums in float32, rounded once."""
    if isinstance(x, Tensor) and scheme.rounds_rows:
        x = RoundedRows(*rounded_rows(x, scheme), x.dtype)
    if isinstance(x, RoundedRows):
        product = F.linear(x.values.float(), values.float()) * x.scales.unsqueeze(-1) * scales.float().T
    elif scheme.is_packed:
        product = F.linear(x.float(), dense(values, scales, scheme))
    else:
        product = F.linear(x.float(), values.float()) * scales.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
