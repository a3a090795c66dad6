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

    def in_blocks(self, size: int) -> Case:
        """The same rows in blocks that lie about in a pool. Block 0, and the end of each row's last, are NaN."""
        slots, width = self.keys.shape[0], -(-max(self.keys.shape[2], self.reach.longest) // size)
        places = 1 + torch.randperm(slots * width)
        table = places.view(slots, width).int()
        lengths = dict(zip(self.reach.slots.tolist(), self.reach.lengths.tolist(), strict=True))
        for slot in range(slots):
            table[slot, -(-lengths.get(slot, 0) // size) :] = 0
        pools = [self._cut(pool, places.to(DEVICE), width, size) for pool in (self.keys, self.values)]
        return replace(self, keys=pools[0], values=pools[1], reach=replace(self.reach, table=table.to(DEVICE)))

    def _cut(self, pool: Tensor, places: Tensor, width: int, size: int) -> Tensor:
        rows = pool.transpose(1, 2)  # [R, C, Hk, D]
        whole = rows.new_full((rows.shape[0], width * size, *rows.shape[2:]), torch.nan)
        whole[:, : rows.shape[1]] = rows
        blocks = rows.new_full((1 + len(places), size, *rows.shape[2:]), torch.nan)
        blocks[places] = whole.unflatten(1, (width, size)).flatten(0, 1)
        return blocks.transpose(1, 2)


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
