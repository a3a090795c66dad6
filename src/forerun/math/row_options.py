"""Bias, penalties and bans of several rows as tensors, so that a device applies and advances them by itself.

The law is that of `math.penalties` with banned ids behind it, operation for operation; only the form is another: one
dense entry for every id instead of lists of ids met, because what a row will have met is known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.precision import working

# Bits of `RowOptions.bans`.
NEVER, NOT_FIRST, NOT_EARLY = 1, 2, 4


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What R rows ask of their logits. All neutral where a row asks for nothing."""

    counts: Tensor  # [R, V] int32: twice how often the row has emitted an id, and 1 more where its prompt has it
    bias: Tensor  # [R, V] float32
    bans: Tensor  # [R, V] uint8: bits NEVER, NOT_FIRST (at position 0), NOT_EARLY (before `min_new_tokens`)
    repetition: Tensor  # [R] float64
    presence: Tensor  # [R] float64
    frequency: Tensor  # [R] float64
    min_new_tokens: Tensor  # [R] int64

    def clear(self) -> None:
        """No row has met, prefers or may not say any id."""
        for table in (self.counts, self.bias, self.bans):
            table.zero_()


def adjust_rows(
    logits: Tensor,  # [R * n, V], row by row
    options: RowOptions,
    position: Tensor,  # [R] int64, tokens each row has emitted
    drafted: Tensor,  # [R, first + n - 1] int64 or wider
    first: int = 0,
    ids: Tensor | None = None,
    seen: Tensor | None = None,  # [R, n, M] bool
) -> Tensor:
    """A new tensor of logits for n consecutive positions of every row, in float32 (float64 stays what it is).

    Position i has seen the row's history and the first `first + i` of its drafted tokens; in a tree those of the first
    M that it has `seen`. With `ids` ([Vd] ascending) the logits are of those tokens only.
    """
    rows = len(position)
    adjusted = working(logits).view(rows, -1, logits.shape[-1])
    num_positions = adjusted.shape[1]
    counts = options.counts.unsqueeze(1).repeat(1, num_positions, 1)
    if seen is None:
        column = torch.arange(first + num_positions - 1, device=position.device)
        seen = (column < first + torch.arange(num_positions, device=position.device).unsqueeze(-1)).expand(rows, -1, -1)
    tokens = drafted[:, : seen.shape[2]].unsqueeze(1).expand_as(seen)
    counts.scatter_add_(2, tokens, 2 * seen.to(counts.dtype))
    bias, bans = options.bias.unsqueeze(1), options.bans.unsqueeze(1)
    if ids is not None:
        counts, bias, bans = counts[..., ids], bias[..., ids], bans[..., ids]
    repetition, presence, frequency = (
        number.to(adjusted.dtype).view(-1, 1, 1) for number in (options.repetition, options.presence, options.frequency)
    )
    adjusted = adjusted + bias
    penalised = torch.where(adjusted < 0, adjusted * repetition, adjusted / repetition)
    adjusted = torch.where(counts > 0, penalised, adjusted)
    emitted = (counts // 2).to(adjusted.dtype)
    adjusted = adjusted - (presence * emitted.clamp(max=1) + frequency * emitted)
    place = position.view(-1, 1) + seen.sum(-1)
    bits = NEVER + NOT_FIRST * (place == 0) + NOT_EARLY * (place < options.min_new_tokens.view(-1, 1))
    adjusted = adjusted.masked_fill((bans & bits.to(bans.dtype).unsqueeze(-1)) != 0, -torch.inf)
    return adjusted.flatten(0, 1)


def count_emitted(counts: Tensor, tokens: Tensor, number: Tensor) -> None:
    """Count the first `number[b]` of `tokens` [R, W] as emitted by row b."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    counts.scatter_add_(1, tokens, (2 * (column < number.unsqueeze(-1))).to(counts.dtype))
