"""Round a model's linear layers while it goes to a GPU, one at a time: `load(..., quantize="fp8")`.

The weights of all `nn.Linear` are rounded, that of the head by choice; embeddings, norms and experts stay as they are.
A head that was the embedding is then a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import InvalidArgument
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.routers import routers
from forerun.math.scaled import GROUPS, SCHEMES, Scheme, concatenated, rounded_weight

AT_ONCE = 1 << 24  # numbers of a weight that are float32 at a time
FP8_FROM = (9, 0)  # compute capability: each row of a product has a scale of its own


def why_not(scheme: str, device: torch.device) -> str | None:
    """Why weights cannot be rounded like this on a device; None where they can."""
    if scheme not in SCHEMES:
        return f"there are {', '.join(map(repr, SCHEMES))}"
    if scheme == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_FROM:
        return f"8-bit floats need compute capability 9.0, {torch.cuda.get_device_name(device)} has less; use 'int8'"
    return None


@torch.no_grad()
def round_weights(model: Any, scheme: str, device: torch.device, name: str, with_head: bool = False) -> None:
    """Exchange the weights of linear layers for rounded ones on `device`, one layer at a time."""
    layers = list(_linear_layers(model, with_head))
    fitted = SCHEMES[scheme].fitted(*(layer.weight.shape[1] for _, layer in layers))
    if fitted is None:
        path, odd = min(layers, key=lambda each: each[1].weight.shape[1] % GROUPS[-1] == 0)
        raise InvalidArgument(
            f"quantize={scheme!r}: {path} of {name!r} has {odd.weight.shape[1]} inputs, which no group of "
            f"{', '.join(map(str, GROUPS))} divides; use 'int8'"
        )
    for path, layer in layers:
        layer._parameters["weight"] = nn.Parameter(_rounded(layer.weight, fitted, device, path), requires_grad=False)
    if not layers:
        raise InvalidArgument(f"quantize={scheme!r}: {name!r} has no linear layer that can be rounded; leave it out")
    if with_head:
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False


def _linear_layers(model: Any, with_head: bool) -> Iterator[tuple[str, nn.Linear]]:
    """Those that are torch's own, but for routers of experts."""
    head, left_out = None if with_head else model.get_output_embeddings(), routers(model)
    for path, module in model.named_modules():
        if type(module) is nn.Linear and module is not head and module not in left_out:
            yield path, module


def _rounded(weight: Tensor, scheme: Scheme, device: torch.device, path: str) -> ScaledWeight:
    count = max(1, AT_ONCE // weight.shape[1])
    parts = []
    for some in weight.split(count):
        here = some.to(device)
        if not here.isfinite().all():
            raise InvalidArgument(
                f"quantize={scheme.name!r}: {path} holds a number that is infinite or none; check the model's files"
            )
        parts.append(rounded_weight(here, scheme, weight.dtype))
    values, scales = (concatenated([part[i] for part in parts]) for i in (0, 1))
    return ScaledWeight(values, scales, scheme)
