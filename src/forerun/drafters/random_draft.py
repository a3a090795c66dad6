"""Guesses blindly: the drafter that cannot help, to measure what speculation costs when nothing is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.types import Draft, DraftContext


@dataclass(frozen=True, slots=True)
class UniformLaw:
    """Every token of the vocabulary is as likely as any other, at every position."""

    vocab_size: int

    def of(self, tokens: Tensor) -> Tensor:
        """[B, K] -> [B, K], all 1 / V."""
        return torch.full_like(tokens, 1 / self.vocab_size, dtype=torch.float64)

    def at(self, position: Tensor) -> Tensor:
        """[B] -> [B, V], all 1 / V."""
        shape = (len(position), self.vocab_size)
        return torch.full(shape, 1 / self.vocab_size, dtype=torch.float64, device=position.device)


class RandomDraft(Drafter):
    """Drafts tokens drawn uniformly from the whole vocabulary, whatever the row's sampling parameters are."""

    def propose(self, context: DraftContext) -> Draft:
        """As many tokens as each row may have."""
        width = max(context.max_lengths, default=0)
        uniforms = context.uniforms[:, :width]
        # A float64 below 1 times V never rounds up to V, so no clamp is needed.
        tokens = (uniforms * context.vocab_size).long()
        lengths = torch.tensor(context.max_lengths, dtype=torch.int64, device=context.device)
        return Draft(tokens, lengths, UniformLaw(context.vocab_size))

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""
