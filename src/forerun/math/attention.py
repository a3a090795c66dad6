"""Attention over ragged rows in torch: the two forms of BASS (Qian et al. 2024), PAD and SPLIT.

Queries of all rows come packed, one row after the other; each row has its own number of keys. PAD pads the queries and
reads all rows' keys up to the longest in one batched product; SPLIT makes one product a row and reads nothing twice.
Both read keys in place: the cache's tensors are only ever sliced, never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.types import RaggedRows


class Form(StrEnum):
    """How attention over ragged rows is computed."""

    AUTO = "auto"
    PAD = "pad"
    SPLIT = "split"


# PAD reads (rows x longest) keys, SPLIT reads only the live ones but pays a call a row: on two CPU cores eight rows of
# 256 keys take 0.74 ms padded and 1.5 ms split, so half of the padded reading must be waste before SPLIT pays.
WASTE_BEFORE_SPLIT = 0.5


@dataclass(frozen=True, slots=True)
class Scale:
    """What is done to the scores before the softmax."""

    factor: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq] a learned score per head that attends to nothing


def choose_form(rows: RaggedRows) -> Form:
    """PAD for rows of similar length that lie side by side, SPLIT otherwise."""
    first = rows.slots[0]
    side_by_side = rows.slots == tuple(range(first, first + len(rows.slots)))
    if not side_by_side:
        return Form.SPLIT
    padded = len(rows.slots) * rows.longest * max(rows.counts)
    live = sum((past + count) * count for past, count in zip(rows.past, rows.counts, strict=True))
    return Form.PAD if live >= padded * (1 - WASTE_BEFORE_SPLIT) else Form.SPLIT


def attend(
    query: Tensor,  # [N, Hq, D] new tokens of all rows, packed
    keys: Tensor,  # [R, C, Hk, D] every row of the cache, the new tokens written already
    values: Tensor,  # [R, C, Hk, Dv]
    rows: RaggedRows,
    mask: Tensor | None,  # [N, S] bool, S = rows.longest; None where every query sees all keys of its row
    scale: Scale,
    form: Form = Form.AUTO,
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys."""
    if form is Form.AUTO:
        form = choose_form(rows)
    run = attend_padded if form is Form.PAD else attend_split
    return run(query, keys, values, rows, mask, scale)


def attend_split(
    query: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, mask: Tensor | None, scale: Scale
) -> Tensor:
    """One product a row: nothing padded, nothing read beyond a row's own keys."""
    parts = []
    start = 0
    for slot, past, count in zip(rows.slots, rows.past, rows.counts, strict=True):
        length = past + count
        own = slice(start, start + count)
        seen = None if mask is None else mask[None, own, :length]
        k, v = keys[slot : slot + 1, :length], values[slot : slot + 1, :length]
        parts.append(_attend_block(query[None, own], k, v, seen, scale)[0])
        start += count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def attend_padded(
    query: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, mask: Tensor | None, scale: Scale
) -> Tensor:
    """One batched product: queries padded to the longest draft, keys read up to the longest row."""
    first, batch, width = rows.slots[0], len(rows.slots), max(rows.counts)
    k, v = (pool[first : first + batch, : rows.longest] for pool in (keys, values))
    if mask is None and len(set(rows.past)) > 1:
        lengths = torch.tensor([p + c for p, c in zip(rows.past, rows.counts, strict=True)], device=query.device)
        owners = torch.repeat_interleave(lengths, torch.tensor(rows.counts, device=query.device))
        mask = torch.arange(rows.longest, device=query.device) < owners[:, None]
    if min(rows.counts) == width:
        block = query.view(batch, width, *query.shape[1:])
        seen = None if mask is None else mask.view(batch, width, -1)
        return _attend_block(block, k, v, seen, scale).flatten(0, 1)
    place = pad_index(rows, query.device)
    seen = None if mask is None else mask[place.clamp(min=0)]
    out = _attend_block(query[place.clamp(min=0)], k, v, seen, scale)
    return out[place >= 0]


def pad_index(rows: RaggedRows, device: torch.device) -> Tensor:
    """[B, T] place of token t of row b among the packed tokens, -1 past the row's count."""
    counts = torch.tensor(rows.counts, device=device)[:, None]
    starts = counts.cumsum(0) - counts
    step = torch.arange(max(rows.counts), device=device)
    return torch.where(step < counts, starts + step, -1)


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: Scale) -> Tensor:
    """[B, T, Hq, D] queries, [B, S, Hk, D] keys, [B, T, S] mask -> [B, T, Hq, Dv].

    The query heads of one key head are folded into the query axis: one key read serves the whole group.
    """
    batch, width, query_heads, size = query.shape
    key_heads = keys.shape[2]
    group = query_heads // key_heads
    folded = query.view(batch, width, key_heads, group, size).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, key_heads, group * width, size)
    if seen is not None:
        seen = seen[:, None, None].expand(batch, 1, group, width, -1).reshape(batch, 1, group * width, -1)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    if scale.softcap is None and scale.sinks is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen, scale=scale.factor)
    else:
        out = _softmax_by_hand(folded, k, v, seen, scale, group)
    out = out.view(batch, key_heads, group, width, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, width, query_heads, -1)


def _softmax_by_hand(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: Scale, group: int
) -> Tensor:
    """For the two things the library's attention cannot do: capped scores and sinks."""
    scores = query @ keys.transpose(-1, -2) * scale.factor
    if scale.softcap is not None:
        scores = torch.tanh(scores / scale.softcap) * scale.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if scale.sinks is None:
        return torch.softmax(scores.float(), dim=-1).to(values.dtype) @ values
    batch, heads, rows, _ = scores.shape
    sink = scale.sinks.view(1, heads, group, 1).expand(batch, heads, group, rows // group)
    scores = torch.cat([scores, sink.reshape(batch, heads, rows, 1)], dim=-1)
    return torch.softmax(scores.float(), dim=-1)[..., :-1].to(values.dtype) @ values
