"""Keys and values of a cache that are rounded to eight bits, each head of each token by its own largest number.

A `ScaledKeys` says it is of the model's type. Writing rounds (`ops.write`), kernels read the stored bytes, and torch
reads a wide copy of what it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.math.scaled import Scheme, rounded_rows


class ScaledKeys(Tensor):
    """Numbers [slots, capacity, heads, size], or a view of the same memory: see `flat` and `by_head`."""

    raw: Tensor  # of this shape, int8 or float8_e4m3fn
    # [slots, heads, capacity] float32, whatever the view: a head's scales lie side by side, as attention reads them.
    scales: Tensor
    scheme: Scheme
    is_by_head: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, values: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype, is_by_head: bool = False
    ) -> ScaledKeys:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=dtype, device=values.device
        )

    def __init__(
        self, values: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype, is_by_head: bool = False
    ) -> None:
        self.raw, self.scales, self.scheme, self.is_by_head = values, scales, scheme, is_by_head

    @classmethod
    def zeros(cls, shape: Sequence[int], scheme: Scheme, dtype: torch.dtype, device: torch.device) -> ScaledKeys:
        """[slots, capacity, heads, size]: zeros, because block 0 is read where nothing was written."""
        slots, capacity, heads, _ = shape
        values = torch.zeros(*shape, dtype=torch.uint8, device=device).view(scheme.values)
        return cls(values, torch.zeros(slots, heads, capacity, device=device), scheme, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledKeys({self.scheme.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def flat(self) -> ScaledKeys:
        """[slots * capacity, heads, size], for writing."""
        return ScaledKeys(self.raw.flatten(0, 1), self.scales, self.scheme, self.dtype)

    def by_head(self) -> ScaledKeys:
        """[slots, heads, capacity, size], for reading."""
        return ScaledKeys(self.raw.transpose(1, 2), self.scales, self.scheme, self.dtype, True)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """What is copied when rows are, with slots and places as the first two axes."""
        return self.raw, self.scales.transpose(1, 2)

    def write(self, addresses: Tensor, new: Tensor) -> None:
        """Of the flat view: round what is `new` [N, heads, size] and leave it at its addresses [N]."""
        values, scales = rounded_rows(new, self.scheme)
        capacity = self.scales.shape[2]
        self.raw.view(torch.uint8).index_copy_(0, addresses, values.view(torch.uint8))
        self.scales.transpose(1, 2)[addresses // capacity, addresses % capacity] = scales

    def picked(self, *index: Any) -> Tensor:
        """Of the view by head: a wide copy of what lies there."""
        wide = self.raw[index].float() * self.scales[index].unsqueeze(-1)
        return wide.to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.index.Tensor and args[0].is_by_head:
            index = tuple(slice(None) if each is None else each for each in args[1])
            return args[0].picked(*index)
        if func is torch.ops.aten.index_copy_.default and not args[0].is_by_head:
            args[0].write(*args[2:])
            return args[0]
        raise NotImplementedError(f"{func} on rounded keys: they are written by ops.write and read by attention")
