"""Random weights in any of GGUF's formats."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.math.blocks import BlockFormat, format_named

SIZE = 96  # inputs: three blocks


def size_of(name: str) -> int:
    """Inputs of a test: a few blocks."""
    return 2 * format_named(name).values if name.endswith("_K") else SIZE


def stored_rows(name: str, count: int, size: int = SIZE, seed: int = 0) -> tuple[Tensor, BlockFormat]:
    """Random bytes that decode to ordinary numbers: every half-precision scale lies between 1/8 and 2."""
    stored, generator = format_named(name), torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (count, size // stored.values * stored.size), dtype=torch.uint8, generator=generator)
    if stored.values == 1:
        values = torch.randn(count, size, generator=generator)
        return values.to(torch.bfloat16 if name == "BF16" else torch.float16).view(torch.uint8), stored
    blocks = raw.view(-1, stored.size)
    for place in _scales(name):
        scale = (torch.rand(len(blocks), generator=generator) + 0.125) * (1 - 2 * torch.rand(len(blocks)).round())
        blocks[:, place : place + 2] = scale.half()[:, None].view(torch.uint8)
    return raw, stored


def _scales(name: str) -> tuple[int, ...]:
    """Where the half-precision numbers of a block lie."""
    return {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
