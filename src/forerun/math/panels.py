"""Products of 8-bit integers whose activations are rounded in groups of 32: weights with one scale an output.

A token's numbers share a scale with 31 neighbours instead of with all of them, so one that stands far out spoils its
own group alone. Sums within a group are exact; groups are added up in their order, one rounding for the product with
the group's scale and one for the sum. So every machine and every number of rows gives the same bits.

Weights lie in panels of 16 outputs: their scales, then the numbers of four inputs for each output, then the next four
inputs. A vector of such numbers times four numbers of a token is one instruction, and a lane is an output: nothing has
to be added up across lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.math.blocks import BlockFormat
from forerun.math.integer import SCALE, rounded

NAME = "I8_32"
PANEL = 16  # outputs side by side
QUAD = 4  # inputs of an output side by side
GROUP = 32  # activations that share a scale


def panel_linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] float32, rounded in groups, times numbers [N, K] int8 with scales [N] -> [.., N] float32."""
    steps, scale = rounded(x.unflatten(-1, (-1, GROUP)))  # [.., groups, 32], [.., groups, 1]
    weights = numbers.unflatten(-1, (-1, GROUP)).long()
    total = x.new_zeros(*x.shape[:-1], len(numbers))
    for group in range(steps.shape[-2]):
        sums = steps[..., group, :].long() @ weights[:, group].T
        total = total + sums.float() * scale[..., group, :]
    out = total * scales
    return out if bias is None else out + bias


def encode_panels(values: Tensor) -> Tensor:
    """[N, K] float32 -> [N, 4 + K] bytes, of which each 16 rows are a panel; N is a multiple of 16, K of 32."""
    numbers, scale = rounded(values)
    count, size = values.shape
    quads = numbers.view(count // PANEL, PANEL, size // QUAD, QUAD).transpose(1, 2)
    heads = scale.contiguous().view(count // PANEL, PANEL).view(torch.uint8)
    return torch.cat([heads, quads.reshape(len(heads), -1).view(torch.uint8)], dim=1).view(count, SCALE + size)


def panel_format(size: int) -> BlockFormat:
    """How panels of `size` inputs are stored; a row stands for a sixteenth of its panel."""

    def decode(raw: Tensor) -> Tensor:
        numbers, scales = panel_parts(raw.view(-1, SCALE + size))
        return (scales[:, None] * numbers).flatten()

    return BlockFormat(NAME, size, SCALE + size, decode)


def panel_parts(raw: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 4 + K] bytes -> numbers [N, K] int8 and scales [N] float32."""
    size = raw.shape[1]
    panels = raw.reshape(len(raw) // PANEL, PANEL * size)
    scales = panels[:, : SCALE * PANEL].contiguous().view(torch.float32).flatten()
    quads = panels[:, SCALE * PANEL :].view(torch.int8).unflatten(1, (-1, PANEL, QUAD))
    return quads.transpose(1, 2).reshape(len(raw), size - SCALE), scales


def look_up(raw: Tensor, ids: Tensor) -> Tensor:
    """The rows of these ids [n], float32 [n, K]."""
    panels = raw.view(len(raw) // PANEL, -1).index_select(0, ids // PANEL)  # which refuses negative ids
    places = torch.arange(len(ids)) * PANEL + ids % PANEL
    numbers, scales = panel_parts(panels.view(len(ids) * PANEL, raw.shape[1]))
    return scales[places, None] * numbers[places]
