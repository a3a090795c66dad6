"""Rows of different lengths side by side, as a model expects a batch: pasts end together, new tokens begin together.

    row 0   . . . a b c | d e         `a` to `c` and `g` to `l` lie in the cache, `.` and `-` are pads nobody sees
    row 1   g h i j k l | m -

So a row's new tokens stand right behind its past, and behind as many keys as the longest past has: what a model works
out from places (ALiBi, local windows, the cache's length) differs from the truth by one number a row at most. Where a
model rounds what it works out, so that one number is too much, `ModulesBody.call` tells it which keys are pads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.base import KeyValueCache
from forerun.types import RaggedRows


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """B rows of T new tokens and S = longest past + T keys."""

    tokens: Tensor  # [B, T] which of the packed tokens stands where; past a row's count its last one once more
    is_real: Tensor  # [B, T] bool, False for those repeated ones
    places: Tensor  # [B, S] how many keys of its row come before each key, negative for pads in front
    pieces: Tensor  # [B, 1, S or 1] slots or blocks of the cache that hold the keys
    kept: Tensor  # [B, 1, S] where keys lie within those; pads show the row's first key or its last

    @classmethod
    def of(cls, rows: RaggedRows, cache: KeyValueCache, device: torch.device) -> PaddedRows:
        counts, past = torch.tensor([rows.counts, rows.past])[..., None]
        step = torch.arange(max(rows.counts))
        tokens = counts.cumsum(0) - counts + torch.minimum(step, counts - 1)
        longest = max(rows.past)
        places = torch.arange(longest + len(step)) - (longest - past)
        pieces, kept = cache.locate(rows, places.clamp(min=0).minimum(past + counts - 1))
        return cls(*(part.to(device) for part in (tokens, step < counts, places, pieces[:, None], kept[:, None])))

    def packed(self, padded: Tensor) -> Tensor:
        """[B, T, ..] -> [N, ..], pads left out."""
        return padded[self.is_real]

    def rows_of(self, pool: Tensor) -> Tensor:
        """[pieces, H, keys, D] -> [B, H, S, D], contiguous: what a model's own cache would return."""
        heads = torch.arange(pool.shape[1], device=pool.device)[:, None]
        return pool[self.pieces, heads, self.kept]
