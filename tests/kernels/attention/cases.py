"""Caches with rows of every kind, and nothing but NaN where nobody may look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.math.attention import Scale
from forerun.math.ragged_attention import Reach, reach_of
from forerun.types import RaggedRows
from support.interpreter import DEVICE

# Rows out of order; one that begins, one longer than several blocks of keys, one with a single new token.
ROWS = RaggedRows(slots=(3, 0, 2), past=(70, 0, 17), counts=(3, 5, 1))


@dataclass(frozen=True)
class Case:
    """One call, and the rows it is about."""

    query: Tensor  # [N, Hq, D]
    keys: Tensor  # [R, Hk, C, D]
    values: Tensor  # [R, Hk, C, Dv]
    reach: Reach
    scale: Scale

    def with_tree(self, tree: Tensor) -> Case:
        return replace(self, reach=replace(self.reach, tree=tree))


def make_case(
    rows: RaggedRows = ROWS,
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64),
    window: int = 0,
    softcap: float | None = None,
    sinks: bool = False,
    distances: int = 0,
    longest: int | None = None,
    gain: float = 1.0,
) -> Case:
    """Random numbers in a layout like the cache's; what no row owns is NaN."""
    slots, capacity = max(rows.slots) + 2, rows.longest + 9
    query = gain * torch.randn(rows.num_tokens, heads[0], sizes[0])
    pools = [torch.full((slots, capacity, heads[1], size), torch.nan) for size in sizes]
    for slot, past, count in zip(rows.slots, rows.past, rows.counts, strict=True):
        for pool in pools:
            pool[slot, : past + count] = torch.randn(past + count, *pool.shape[2:])
    keys, values = (pool.to(DEVICE, dtype).transpose(1, 2) for pool in pools)
    reach = reach_of(rows, DEVICE, window)
    sink = torch.randn(heads[0]).to(DEVICE, dtype) if sinks else None
    bias = torch.randn(heads[0], distances).to(DEVICE) if distances else None
    scale = Scale(1.3 * sizes[0] ** -0.5, softcap, sink, bias)
    return Case(query.to(DEVICE, dtype), keys, values, replace(reach, longest=longest or reach.longest), scale)


def random_tree(rows: RaggedRows, width: int) -> Tensor:
    """[N, width] bool: every token has a parent among its row's earlier ones, or none, and sees its ancestors."""
    lines = []
    for count in rows.counts:
        own = torch.zeros(count, width, dtype=torch.bool)
        for token in range(count):
            parent = int(torch.randint(-1, token, ())) if token else -1
            if parent >= 0:
                own[token] = own[parent]
            own[token, token] = True
        lines.append(own)
    return torch.cat(lines).to(DEVICE)
