"""Our few-row product inside any model on the CPU: its linear layers call it for the duration of a pass.

For families that are not fused. Only plain `nn.Linear`s that nobody has wrapped are touched, in models of which nothing
is compiled, and only during a pass of ours: `model.generate` on the same model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun import kernels, ops
from forerun.config import Kernels
from forerun.models.passes import replacing
from forerun.models.plain import has_compiled

MOST_ROWS = 32  # more rows than this are a matter for the library


class LinearPatches:
    """The linear layers of one model that our product can take, and whether it is the faster one for each shape.

    `without` is a part of the model that no pass runs.
    """

    def __init__(self, model: PreTrainedModel, use: Kernels, without: nn.Module | None = None) -> None:
        self._use = use
        self._layers: dict[tuple[int, ...], list[nn.Linear]] = {}
        if use is Kernels.OFF or model.device.type != "cpu" or kernels.why_not_numba() or has_compiled(model):
            return
        left_out = set() if without is None else set(without.modules())
        for module in (module for module in model.modules() if module not in left_out):
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _fits(module):
                self._layers.setdefault(tuple(module.weight.shape), []).append(module)
        if use is Kernels.AUTO:
            for layers in self._layers.values():
                ops.prefers_own_linear(layers[0].weight, 1)  # timed now, not in the middle of a sentence

    @contextmanager
    def during_pass(self, num_rows: int) -> Iterator[None]:
        """Let the layers use our product where it is faster for so many rows."""
        chosen = (layer for layers in self._chosen(num_rows) for layer in layers)
        changed = [layer for layer in chosen if "forward" not in layer.__dict__]  # somebody's own stays where it is
        with replacing([(layer, "forward", partial(_forward, layer, self._use)) for layer in changed]):
            yield

    def _chosen(self, num_rows: int) -> list[list[nn.Linear]]:
        if not self._layers or num_rows > MOST_ROWS:
            return []
        by_shape = self._layers.values()
        return [layers for layers in by_shape if ops.prefers_own_linear(layers[0].weight, num_rows, self._use)]


def _fits(layer: nn.Linear) -> bool:
    from forerun.kernels.cpu import linear

    weight = layer._parameters.get("weight")
    return weight is not None and linear.why_not(weight) is None


def _forward(layer: nn.Linear, use: Kernels, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and layer.weight.requires_grad and not torch.is_inference_mode_enabled():
        return nn.functional.linear(x, layer.weight, layer.bias)
    return ops.linear(x, layer.weight, layer.bias, use)
