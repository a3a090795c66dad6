"""Where tokens stand when a row ends in a tree: positions go by depth, and branches do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.math.tree import depths
from forerun.types import RaggedRows

# On the host: a pass has many small rows, and numpy's small operations cost a fraction of torch's.
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
        new = [keys[past : past + n] for (keys, _), past, n in zip(parts, rows.past, rows.counts, strict=True)]
        arrays = (
            np.concatenate(new),
            np.stack([keys for keys, _ in parts]),
            np.repeat(np.arange(len(parts)), rows.counts),
            np.concatenate([seen for _, seen in parts]),
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def new_trees(rows: RaggedRows, trees: Sequence[Sequence[int]]) -> Tensor | None:
    """[N, T] bool: which of its row's new tokens each new one sees. None where a tree began in an earlier pass."""
    if any(len(parents) > count for parents, count in zip(trees, rows.counts, strict=True)):
        return None
    width = max(rows.counts)
    return torch.from_numpy(np.concatenate([_among_new(*row, width) for row in zip(rows.counts, trees, strict=True)]))


def _among_new(count: int, parents: Sequence[int], width: int) -> Flags:
    """[count, width]: tokens before the tree see what comes before them, nodes those tokens and their ancestors."""
    first = count - len(parents)
    seen = np.tri(count, width, dtype=np.bool_)
    seen[first:, first:count] = _ancestors(parents)
    return seen


def _ancestors(parents: Sequence[int]) -> Flags:
    """[M, M]: each node, and those it descends from."""
    ancestors = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def _of_row(past: int, count: int, parents: Sequence[int], span: int) -> tuple[Integers, Flags]:
    """Positions of all keys [S], and which of them each new token may see as far as branches go [count, S]."""
    start = past + count - len(parents)
    positions = np.arange(span)
    positions[start : past + count] = np.array(depths(parents), dtype=np.int64) + (start - 1)
    ancestors = _ancestors(parents)
    seen = np.ones((count, span), dtype=np.bool_)
    first = max(past, start)  # the first new token that belongs to the tree
    seen[first - past :, start : past + count] = ancestors[first - start :]
    return positions, seen
