"""What one recording leaves for the next: one buffer for all shapes, as large as the largest needs."""

from __future__ import annotations

import torch
from torch import Tensor

ROOMY = 128  # rows up to which room doubles; beyond that memory is dearer than recording anew


class Scratch:
    """Rows (of logits, of hidden states) in the model's own dtype, made when the first of them are there to see."""

    def __init__(self) -> None:
        self.rows = torch.empty(0, 0)  # [N, V]
        self.version = 0

    def hold(self, like: Tensor, number: int) -> None:
        """Room for `number` rows like those of `like` [n, V]; rows held before may be lost."""
        if len(self.rows) < number or self.rows.shape[1] != like.shape[1] or self.rows.dtype != like.dtype:
            number = max(number, min(2 * len(self.rows), ROOMY))  # a policy that tries longer drafts soon tries more
            self.rows = torch.empty(0, 0)  # let go before asking for more
            self.rows = like.new_empty(number, like.shape[1])
            self.version += 1
