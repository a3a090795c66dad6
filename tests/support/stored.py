"""Random weights in any of GGUF's formats, and models of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.kernels.cpu.narrow import NarrowWeight, narrow_parameter
from forerun.math.blocks import BlockFormat, format_named

SIZE = 96  # inputs: three blocks
HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def size_of(name: str) -> int:
    """Inputs of a test: a few blocks."""
    return 2 * format_named(name).values if name.endswith("_K") else SIZE


def stored_rows(name: str, count: int, size: int = SIZE, seed: int = 0) -> tuple[Tensor, BlockFormat]:
    """Random bytes that decode to ordinary numbers: every half-precision scale lies between 1/8 and 2."""
    stored, generator = format_named(name), torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (count, size // stored.values * stored.size), dtype=torch.uint8, generator=generator)
    if stored.values == 1:
        values = torch.randn(count, size, generator=generator)
        return values.to(HALVES[name]).view(torch.uint8), stored
    blocks = raw.view(-1, stored.size)
    for place in _scales(name):
        scale = (torch.rand(len(blocks), generator=generator) + 0.125) * (1 - 2 * torch.rand(len(blocks)).round())
        blocks[:, place : place + 2] = scale.half()[:, None].view(torch.uint8)
    return raw, stored


def _scales(name: str) -> tuple[int, ...]:
    """Where the half-precision numbers of a block lie."""
    return {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))


def sizes_for(name: str) -> dict[str, Any]:
    """Of a tiny model all of whose matrices are whole blocks."""
    size = max(format_named(name).values, 64)
    return {"hidden_size": size, "intermediate_size": size, "head_dim": size // 4}


def store(model: PreTrainedModel, name: str) -> None:
    """Exchange a model's matrices for random ones of a format, whose numbers are spread as theirs were."""
    for seed, module in enumerate(model.modules()):
        if type(module) in (nn.Linear, nn.Embedding):
            module._parameters["weight"] = narrow_parameter(*_stored_like(module.weight, name, seed))


def _stored_like(weight: Tensor, name: str, seed: int) -> tuple[Tensor, BlockFormat]:
    if name in HALVES:
        return weight.detach().to(HALVES[name]).contiguous().view(torch.uint8), format_named(name)
    raw, stored = stored_rows(name, weight.shape[0], weight.shape[1], seed)
    factor, blocks = weight.std() / stored.decode(raw.flatten()).std(), raw.view(-1, stored.size)
    for place in _scales(name):
        scale = blocks[:, place : place + 2].contiguous().view(torch.float16)
        blocks[:, place : place + 2] = (scale.float() * factor).half().view(torch.uint8)
    return raw, stored


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """The same numbers as plain parameters."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, NarrowWeight):
            dense = weight.format.decode(weight.raw.flatten()).view(weight.shape)
            module._parameters["weight"] = nn.Parameter(dense, requires_grad=False)
    return twin
