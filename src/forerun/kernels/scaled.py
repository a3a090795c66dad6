"""Weights on a GPU that are rounded to 8 or 4 bits and multiplied as they are stored.

A `ScaledWeight` stands in a module for the parameter it was rounded from and says it is of the model's type, so every
module works as before: a linear layer's product reads the stored bytes, everything else torch is asked for works on a
wide copy made for the moment. It is another weight than the one it was rounded from: the model's text follows it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.kernels import why_not_triton
from forerun.kernels.fallback import or_reference
from forerun.math import scaled
from forerun.math.scaled import RoundedRows, RoundedWeight

REMEDY = "load the model without quantize= for that"
_TRAINING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class ScaledWeight(RoundedWeight):
    """A rounded weight that torch's functions take like any other."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledWeight({self.scheme.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(*args)
        if func == Tensor.__setitem__:
            raise InvalidArgument(f"quantised weights cannot be changed in place; {REMEDY}")
        if func in _TRAINING and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
            raise InvalidArgument(f"quantised weights cannot be trained; {REMEDY}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEPT:
            return args[0].with_tensors(args[0].raw, args[0].scales)
        if func is torch.ops.aten.clone.default:
            return args[0].with_tensors(args[0].raw.clone(), args[0].scales.clone())
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            place = kwargs.get("device") or args[0].device
            return args[0].with_tensors(args[0].raw.to(place), args[0].scales.to(place))
        if func._schema.is_mutable and isinstance(args[0], ScaledWeight):
            raise InvalidArgument(f"quantised weights cannot be changed in place; {REMEDY}")
        args, kwargs = tree_map_only(ScaledWeight, ScaledWeight.dense, (args, kwargs))
        return func(*args, **kwargs)


def _set_data(weight: Tensor, value: Tensor) -> None:
    """What `model.to` does with every parameter; torch would keep the class and exchange what lies below it."""
    if not isinstance(weight, ScaledWeight) or not isinstance(value, ScaledWeight):
        raise InvalidArgument(f"quantised weights cannot become others; {REMEDY}")
    if value.device != weight.device:  # a tensor of this kind says forever what device it was made on
        raise InvalidArgument(
            f"quantised weights on {weight.device} cannot be set to some on {value.device}; load the model with "
            f"device='{value.device}'"
        )
    weight.raw, weight.scales, weight.scheme = value.raw, value.scales, value.scheme


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, ScaledWeight) or isinstance(x, ScaledWeight):
        return F.linear(*tree_map_only(ScaledWeight, ScaledWeight.dense, (x, weight, bias)))
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return F.linear(x, weight.dense(), bias)
    rows = x.reshape(-1, x.shape[-1])
    return product(rows.contiguous(), weight, bias).unflatten(0, x.shape[:-1])


@or_reference
def product(
    x: Tensor | RoundedRows, weight: ScaledWeight, bias: Tensor | None = None, use: Kernels = Kernels.AUTO
) -> Tensor:
    """[R, K] -> [R, N]: few rows by a kernel of ours, many by torch's own products, by the reference elsewhere."""
    if use is not Kernels.OFF and why_not_triton(weight.device) is None and x.dtype == weight.dtype:
        from forerun.kernels.linear import many_rows, project

        if project.why_not(x, weight) is None:
            return project.project(x, weight, bias)
        if weight.device.type == "cuda" and len(x):
            return many_rows.linear(x, weight, bias)
    return scaled.linear(x, weight.raw, weight.scales, weight.scheme, bias)
