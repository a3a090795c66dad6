"""Tokens that may not be said: transformers' two processors for that, for all positions of a draft at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Banned:
    """`ids` are never said, or not as the token that follows the first `at` of a row."""

    def __init__(self, ids: Sequence[int], at: int | None = None) -> None:
        self.ids, self.at = torch.tensor(sorted(set(ids))), at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores)

    def along(self, history: Sequence[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
        """[n, V] of the positions after `history` and each token of `drafted`."""
        first = 0 if self.at is None else self.at - len(history)
        last = len(logits) if self.at is None else first + 1
        if last <= 0 or first >= len(logits):
            return logits
        ids = self.ids[self.ids < logits.shape[1]].to(logits.device)
        logits = logits.clone()
        logits[first:last].index_fill_(1, ids, -torch.inf)
        return logits
