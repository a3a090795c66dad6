"""Where tokens stand when a row ends in a tree: positions go by depth, and branches do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.tree import depths
from forerun.types import RaggedRows


@dataclass(frozen=True, slots=True)
class Branches:
    """What a pass over trees needs beyond `RaggedRows`. S keys a row."""

    positions: Tensor  # [N] of the new tokens
    key_positions: Tensor  # [B, S] of each row's keys as they lie in the cache
    owner: Tensor  # [N] the batch row of each new token
    seen: Tensor  # [N, S] bool, False for keys that lie on another branch

    @classmethod
    def of(cls, rows: RaggedRows, trees: Sequence[Sequence[int]], span: int, device: torch.device) -> Branches:
        """`trees[b]` are the parents of the last keys of row b once the new ones are in; -1 is the key before them."""
        parts = [_of_row(*row, span) for row in zip(rows.past, rows.counts, trees, strict=True)]
        key_positions = torch.stack([keys for keys, _ in parts])
        new = [keys[past : past + n] for (keys, _), past, n in zip(parts, rows.past, rows.counts, strict=True)]
        owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(rows.counts))
        seen = torch.cat([seen for _, seen in parts])
        return cls(torch.cat(new).to(device), key_positions.to(device), owner.to(device), seen.to(device))


def _of_row(past: int, count: int, parents: Sequence[int], span: int) -> tuple[Tensor, Tensor]:
    """Positions of all keys [S], and which of them each new token may see as far as branches go [count, S]."""
    start = past + count - len(parents)
    positions = torch.arange(span)
    positions[start : past + count] = torch.tensor(depths(parents), dtype=torch.long) + start - 1
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    seen = torch.ones(count, span, dtype=torch.bool)
    first = max(past, start)  # the first new token that belongs to the tree
    seen[first - past :, start : past + count] = ancestors[first - start :]
    return positions, seen
