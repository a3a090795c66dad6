"""Quantise a model's weights while it is loaded on a CPU, one matrix at a time: `load(..., quantize="int8")`.

Weights alone: activations stay float32. Linear layers and embeddings are quantised in groups of 32 values; with four
bits, embedding and head keep eight, because every logit hangs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import InvalidArgument
from forerun.kernels import why_not_numba
from forerun.kernels.cpu.narrow import NarrowWeight, narrow_parameter
from forerun.loading import rounding
from forerun.math.blocks import BlockFormat, format_named
from forerun.math.quantise import GROUP, encode_q4_1, encode_q8_0

SCHEMES = ("int8", "int4")
_ENCODERS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int8": ("Q8_0", encode_q8_0),
    "int4": ("Q4_1", encode_q4_1),
}


def check_scheme(scheme: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise where weights cannot be quantised like this here."""
    if scheme is None:
        return
    if device.type == "cuda":
        if reason := rounding.why_not(scheme, device):
            raise InvalidArgument(f"quantize={scheme!r}: {reason}")
        return
    if scheme not in SCHEMES:
        where = "for a GPU; on a CPU" if rounding.why_not(scheme, device) is None else "unknown;"
        raise InvalidArgument(f"quantize={scheme!r} is {where} there are {' and '.join(map(repr, SCHEMES))}")
    if device.type != "cpu":
        raise InvalidArgument(f"quantize={scheme!r} is for a CPU or a CUDA GPU, not for {device.type!r}; leave it out")
    if dtype != torch.float32:
        raise InvalidArgument(f"quantize={scheme!r} computes in float32, not in {dtype}; leave the dtype out")
    if reason := why_not_numba():
        raise InvalidArgument(f"quantize={scheme!r} needs compiled products: {reason}")


@torch.no_grad()
def quantise(model: Any, scheme: str, name: str) -> None:
    """Exchange the matrices of a model for quantised ones; the float32 copy of one is held at a time."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    made: dict[int, nn.Parameter] = {}
    held = []  # ids stay taken until all weights have been exchanged
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) not in (nn.Linear, nn.Embedding) or weight is None or weight.shape[1] % GROUP:
            continue
        if id(weight) not in made:
            _refuse_blocks(weight, scheme, name)
            held.append(weight)
            made[id(weight)] = _quantised(weight, "int8" if id(weight) in ends else scheme)
        module._parameters["weight"] = made[id(weight)]
    if not made:
        raise InvalidArgument(
            f"quantize={scheme!r}: no linear layer of {name!r} has a multiple of {GROUP} inputs; leave it out"
        )


def _quantised(weight: Tensor, scheme: str) -> nn.Parameter:
    form, encode = _ENCODERS[scheme]
    dense = weight.dense() if isinstance(weight, NarrowWeight) else weight.detach().float()
    if not dense.isfinite().all():
        raise InvalidArgument(f"quantize={scheme!r}: a weight is infinite or not a number; check the model's files")
    return narrow_parameter(encode(dense), format_named(form))


def _refuse_blocks(weight: Tensor, scheme: str, name: str) -> None:
    """Rounding what was rounded before makes it worse, and here no smaller."""
    if isinstance(weight, NarrowWeight) and _has_blocks(weight.format):
        raise InvalidArgument(
            f"quantize={scheme!r}: {name!r} is stored in {weight.format.name} already and stays so in memory; leave "
            "it out, or add dtype='float32' to quantise its float32 copy"
        )


def _has_blocks(stored: BlockFormat) -> bool:
    return stored.values > 1
