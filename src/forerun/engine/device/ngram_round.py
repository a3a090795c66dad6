"""A round whose drafts come from an n-gram table on the device.

All its tokens are drawn by one launch, from laws on few tokens that are kept for verification: there are no logits.
What rows ask of their logits is the target's alone, as in drafts that the host makes with a table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun import ops
from forerun.drafters.device import Shape
from forerun.drafters.device_ngram import DeviceNgrams
from forerun.engine.device.round import DeviceRound
from forerun.math.laws import PointMass, SparseLaw
from forerun.types import Law


class NgramRound(DeviceRound):
    """The work of a round over the rows of one table."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self.drafter, DeviceNgrams)
        self.ngrams = self.drafter.on(self.table.device)
        shape = self.table.size, self.table.width, self.ngrams.most
        # Of every drafted token: [R, W, S] the tokens there were, and how likely each of them was.
        self._ids = torch.zeros(shape, dtype=torch.int64, device=self.table.device)
        self._probs = torch.zeros(shape, device=self.table.device)
        self._first = torch.eye(1, self.ngrams.most, device=self.table.device)[0]  # [S] a law that is sure

    def draft(self, shape: Shape) -> None:
        """K tokens for every row: those that the host found, or else the table's."""
        table, number = self.table, shape.drawn
        if shape.steps is not None:
            table.take_copies(shape.drafted)
        if not number:
            return
        if table.params.all_greedy:
            uniforms = torch.zeros(table.size, number, dtype=torch.float64, device=table.device)
        else:
            uniforms = ops.draft_uniforms(table.keys, number, self.rule, self.use)
        known = table.row_state.past + 1
        drawn = ops.draft_ngrams(self.ngrams, table.recent, known, table.params, uniforms, self.use)
        place = table.row_state.block[:, 2 : 2 + number]
        if shape.steps is None:
            place.copy_(drawn.tokens)
        else:
            place.copy_(torch.where(self._copies(), place, drawn.tokens))
        if not table.params.all_greedy:
            self._ids[:, :number].copy_(drawn.ids)
            self._probs[:, :number].copy_(drawn.probs)

    def _law(self, tokens: Tensor, shape: Shape) -> Law:
        """Copies are certain: a law on one token, in the form of the others'."""
        if not shape.drawn or self.table.params.all_greedy:
            return PointMass(tokens, self.vocab_size)
        if shape.steps is None:
            return SparseLaw(self._ids, self._probs, self.vocab_size)
        width, is_copied = shape.drafted, self._copies().unsqueeze(-1)
        ids = torch.where(is_copied, tokens.unsqueeze(-1), self._ids[:, :width])
        return SparseLaw(ids, torch.where(is_copied, self._first, self._probs[:, :width]), self.vocab_size)

    def _copies(self) -> Tensor:
        """[R, 1] bool: rows whose draft the host has found."""
        return self.table.is_copied.unsqueeze(-1) == 1
