"""Weights that are multiplied with the same input, made one tensor without a second copy of them in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forerun.kernels.scaled import ScaledWeight
from forerun.math.experts import ExpertWeights
from forerun.math.scaled import concatenated
from forerun.math.skinny import Activation

Product: TypeAlias = "nn.Linear | Conv1D"


@torch.inference_mode(False)  # what is made in it can never be trained again, and these are the user's own weights
@torch.no_grad()
def merged(parts: Sequence[Product]) -> tuple[Tensor, Tensor | None]:
    """One weight [sum of N, K] and one bias for linear layers, whose own parameters become views of it.

    The modules work as before and know their parameters by the same names. Parts that are merged already stay where
    they are, so several bodies may share a model's layers.
    """
    weight = _merged_weights([by_outputs(part) for part in parts])
    if all(part.bias is None for part in parts):
        return weight, None
    return weight, _as_one([_bias(part) for part in parts])


@torch.inference_mode(False)
@torch.no_grad()
def by_outputs(part: Product) -> Tensor:
    """A weight [N, K] that lies in this order; GPT-2 says [K, N], and keeps saying so of the same memory."""
    weight: Tensor = part.weight
    if not isinstance(part, Conv1D):
        return weight
    if not weight.T.is_contiguous():
        weight.data = weight.detach().T.contiguous().T
    return weight.detach().T


@torch.inference_mode(False)
@torch.no_grad()
def expert_weights(experts: Any, activation: Activation | None) -> ExpertWeights:
    """The weights of transformers' module of experts, [E, outputs, inputs]; gpt-oss says [E, inputs, outputs].
    LongCat's has rows for its identities, too, which nobody reads."""
    first, second = experts.gate_up_proj, experts.down_proj
    has_bias, is_transposed = getattr(experts, "has_bias", False), getattr(experts, "is_transposed", False)
    if is_transposed:
        for weight in (first, second):
            if not weight.mT.is_contiguous():
                weight.data = weight.detach().mT.contiguous().mT
        first, second = first.mT, second.mT
    return ExpertWeights(
        first.detach()[: len(second)],
        second.detach(),
        activation,
        first_bias=experts.gate_up_proj_bias.detach() if has_bias else None,
        second_bias=experts.down_proj_bias.detach() if has_bias else None,
        in_turns=not getattr(experts, "is_concatenated", True),
    )


def _merged_weights(weights: Sequence[Tensor]) -> Tensor:
    """Of rounded ones both values and scales lie side by side."""
    first = weights[0]
    if not isinstance(first, ScaledWeight):
        return _as_one(weights)
    rounded = [weight for weight in weights if isinstance(weight, ScaledWeight)]
    return first.with_tensors(_as_one([each.raw for each in rounded]), _as_one([each.scales for each in rounded]))


def why_not_merged(parts: Sequence[Product]) -> str | None:
    """Why weights cannot lie side by side; None where they can."""
    schemes = {part.weight.scheme if isinstance(part.weight, ScaledWeight) else None for part in parts}
    return "products of one input whose weights are rounded in different ways" if len(schemes) > 1 else None


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    size = sum(len(part) for part in parts)
    if _are_neighbours(parts):
        return parts[0].detach().as_strided((size, *parts[0].shape[1:]), parts[0].stride())
    whole = concatenated([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def _are_neighbours(parts: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one piece of memory."""
    memory = parts[0].untyped_storage().data_ptr()
    return all(
        b.untyped_storage().data_ptr() == memory and a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parts)
    )


def _bias(part: Product) -> Tensor:
    """Zeros where some parts have a bias and this one has none: they are nobody's, and merging copies them."""
    bias: Tensor | None = part.bias
    weight: Tensor = part.weight
    return bias if bias is not None else weight.new_zeros(weight.shape[0])
