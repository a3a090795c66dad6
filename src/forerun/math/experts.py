"""A mixture of experts: every row through the few MLPs that its router has chosen, in torch.

`kernels.linear.experts` and `kernels.cpu.experts` have the same function: there a chosen expert's weights are read once
for all rows that chose it, and those of the others not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.skinny import Activation, activated


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer, [E, outputs, inputs] in memory."""

    first: Tensor  # [E, 2 I, H]
    second: Tensor  # [E, H, I]
    activation: Activation | None  # of the gate; None: gpt-oss' clamped one, see `_gated`
    first_bias: Tensor | None = None  # [E, 2 I]
    second_bias: Tensor | None = None  # [E, H]
    in_turns: bool = False  # gate and up rows take turns (gpt-oss); otherwise all gate rows stand before all up rows


def run_experts(
    x: Tensor,  # [N, H]
    chosen: Tensor,  # [N, k] int64: each row's experts
    shares: Tensor,  # [N, k]: what each of them counts
    weights: ExpertWeights,
) -> Tensor:  # [N, H]
    """The sum over a row's experts of share * second(gated(first(x)))."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        pairs = _product(x[rows], weights.first[expert], weights.first_bias, expert)
        outputs = _product(_gated(pairs, weights), weights.second[expert], weights.second_bias, expert)
        out.index_add_(0, rows, outputs.float() * shares[rows, place, None].float())
    return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Identities:
    """Of each row, what experts count that give back what they are given."""

    share: Tensor  # [N, 1] of all of them together
    is_alone: Tensor  # [N, 1] whether the row has chosen nothing else

    def added(self, outputs: Tensor, x: Tensor) -> Tensor:
        """[N, H]: what the other experts made, and the identities' part of x."""
        return outputs.masked_fill(self.is_alone, 0) + (self.share * x).to(outputs.dtype)


def without_identities(shares: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Identities]:
    """Take out of shares and experts [N, k] those from number `count` on, which give back what they are given.

    In their places stands one that the row has chosen itself, and counts nothing there: nothing times what another
    expert makes of a row may be no number. A row of identities alone has the first expert; `Identities` drops it.
    """
    is_identity, lowest = chosen >= count, chosen.amin(-1, keepdim=True)
    identities = Identities(shares.masked_fill(~is_identity, 0).sum(-1, keepdim=True), is_alone=lowest >= count)
    stand_in = lowest.masked_fill(identities.is_alone, 0)
    return shares.masked_fill(is_identity, 0), torch.where(is_identity, stand_in, chosen), identities


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias[expert])


def _gated(pairs: Tensor, weights: ExpertWeights) -> Tensor:
    gate, up = (pairs[:, ::2], pairs[:, 1::2]) if weights.in_turns else pairs.chunk(2, dim=-1)
    if weights.activation is None:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return gate * torch.sigmoid(SWIGLU_SLOPE * gate) * up
    return activated(gate, weights.activation) * up


SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of gpt-oss
