"""Decoders of transformers' modules in fewer and faster launches, for the duration of a recorded pass.

In a graph a launch costs about two microseconds whatever it does, and T5's norm is eight of them, its activation eight
more. Norms and activations that are one kernel elsewhere, and products of a few rows, are said by our own; outside a
pass the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from forerun import ops
from forerun.math.skinny import Norm

Forward = Callable[[Any, Tensor], Tensor]


class LeanModules:
    """The modules of a decoder that can be said in one launch. Nobody's own wrapping of a module is touched."""

    def __init__(self, *parts: nn.Module) -> None:
        modules = {id(module): module for part in parts for module in part.modules()}
        self._leaner = [
            (module, found)
            for module in modules.values()
            if (found := _leaner(module)) is not None and "forward" not in module.__dict__
        ]

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        for module, forward in self._leaner:
            module.__dict__["forward"] = partial(forward, module)
        try:
            yield
        finally:
            for module, _ in self._leaner:
                del module.__dict__["forward"]


def _leaner(module: nn.Module) -> Forward | None:
    """Types are exact: what is derived from them may do anything."""
    if type(module) is nn.Linear:
        return _product
    if type(module) in (T5LayerNorm, MT5LayerNorm) and hasattr(module, "variance_epsilon"):
        return _norm
    return _gelu if type(module) is NewGELUActivation else None


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    return ops.project(x.reshape(-1, x.shape[-1]), module.weight, module.bias).view(*x.shape[:-1], -1)


def _norm(module: Any, x: Tensor) -> Tensor:
    return ops.normed(x.reshape(-1, x.shape[-1]), Norm(module.weight, module.variance_epsilon)).view_as(x)


def _gelu(module: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
