"""Attention of many new tokens in torch, block by block: for prompts on a CPU that follow keys or keep to a window.

torch's attention on a CPU leaves out what lies above the diagonal of a causal square, and nothing of what a mask hides.
So queries attend in blocks, each over those keys alone that one of its queries sees. Counted from a block's last query
and last key, the same is hidden in all blocks of all rows: one mask serves them, cut to their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.math.attention import Scale, softmax_product
from forerun.types import RaggedRows

BLOCK = 192  # queries: from so many on torch multiplies 64 of them at a time, and few see keys that others do not
FEW = 64  # queries of a row below which a copy of its keys costs more than it saves


@dataclass(frozen=True, slots=True)
class Bands:
    """Rows whose new tokens see the keys up to their own, no further back than a window."""

    rows: RaggedRows
    window: int  # keys that a token sees, its own included; 0: all
    hidden: Tensor  # [BLOCK, S] 0 where query i of a block sees key j - S from its end, else -inf; S: the most keys


def bands(rows: RaggedRows, window: int, like: Tensor) -> Bands:
    """What all layers of one pass that share a window have in common; `like` has the type of their queries."""
    block = min(BLOCK, max(rows.counts))
    span = rows.longest if not window else min(rows.longest, block + window - 1)
    back = torch.arange(span - 1, -1, -1)[None] - torch.arange(block - 1, -1, -1)[:, None]  # how far, from each query
    seen = (back >= 0) & (back < window) if window else back >= 0
    hidden = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    return Bands(rows, window, hidden.masked_fill_(~seen.to(like.device), -torch.inf))


def attend_bands(
    query: Tensor,  # [N, Hq, D] new tokens of all rows, packed
    keys: Tensor,  # [R, Hk, C, D] every row of the cache, the new tokens written already
    values: Tensor,  # [R, Hk, C, Dv]
    bands: Bands,
    scale: Scale,
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys."""
    rows, parts, start = bands.rows, list[Tensor](), 0
    for slot, past, count in zip(rows.slots, rows.past, rows.counts, strict=True):
        first = max(0, past + 1 - bands.window) if bands.window else 0  # nobody sees what lies before
        k, v = (pool[slot : slot + 1, :, first : past + count] for pool in (keys, values))
        queries = query[start : start + count]
        start += count
        if count == 1:  # a row that decodes beside a prompt sees all of these; heads that share a key are its queries
            folded = queries.reshape(1, k.shape[1], -1, queries.shape[2])
            parts.append(softmax_product(folded, k, v, None, scale, 1).reshape(1, queries.shape[1], -1))
            continue
        # Heads lie side by side in the cache. Where that is a power of two of bytes, a head's keys get into each
        # other's way in the caches of a processor; one copy costs little beside many queries.
        k, v = (part.contiguous() if count >= FEW else part for part in (k, v))
        parts += _attend_row(queries.transpose(0, 1)[None], k, v, bands, scale)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, bands: Bands, scale: Scale) -> Iterator[Tensor]:
    """[1, Hq, n, D] over [1, Hk, S, D], the last n of which are the queries' own: blocks of [.., Hq, Dv]."""
    count, span, group = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    is_plain = scale.softcap is None and scale.sinks is None
    if is_plain and count == span and not 0 < bands.window < span:
        yield softmax_product(query, keys, values, None, scale, group, causal=count > 1)[0].transpose(0, 1)
        return
    if not is_plain and group > 1:  # what is not torch's own attention wants a key head for every query head
        keys, values, group = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), 1
    most = len(bands.hidden)
    for begin in range(0, count, most):
        end = min(begin + most, count)
        last = span - count + end
        first = max(0, last - (end - begin) - bands.window + 1) if bands.window else 0
        hidden = bands.hidden[most - (end - begin) :, bands.hidden.shape[1] - (last - first) :]
        k, v = keys[:, :, first:last], values[:, :, first:last]
        yield softmax_product(query[:, :, begin:end], k, v, hidden, scale, group)[0].transpose(0, 1)
