"""Attention over ragged rows in torch: the two forms of BASS (Qian et al. 2024), PAD and SPLIT.

Queries of all rows come packed, one row after the other; each row has its own number of keys. PAD pads the queries and
reads all rows' keys up to the longest in one batched product; SPLIT makes one product a row and reads nothing twice.
Both read keys in place: the cache's tensors are only ever sliced, never copied. What depends on the rows and the mask
alone is worked out once a pass (`plan`); every layer then only multiplies (`attend`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.math.precision import working
from forerun.types import RaggedRows


class Form(StrEnum):
    """How attention over ragged rows is computed."""

    AUTO = "auto"
    PAD = "pad"
    SPLIT = "split"
    KEYS = "keys"  # on a GPU: several programs share a row's keys; elsewhere the same as SPLIT


# PAD reads (rows x longest) keys, SPLIT reads only the live ones but pays a call a row: on two CPU cores eight rows of
# 256 keys take 0.74 ms padded and 1.5 ms split, so half of the padded reading must be waste before SPLIT pays.
WASTE_BEFORE_SPLIT = 0.5


@dataclass(frozen=True, slots=True)
class Scale:
    """What is done to the scores before the softmax."""

    factor: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq] a learned score per head that attends to nothing
    by_distance: Tensor | None = None  # [Hq, L] float32, by how far back a key lies; the last for all that is further


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one pass that share a mask have in common."""

    rows: RaggedRows
    form: Form  # PAD or SPLIT
    group: int  # query heads that share a key head
    longest: int  # keys of the longest row
    causal: bool  # new rows: each query sees its row's keys up to its own, and no mask is needed
    # Masks [b, 1, M, S], M queries a key head: one for PAD, one a row for SPLIT. With a bias, [b, H, T, S] to be added.
    seen: tuple[Tensor | None, ...]
    place: Tensor | None  # [B, T] for PAD where drafts differ in length: see `pad_index`


def choose_form(rows: RaggedRows, wanted: Form = Form.AUTO) -> Form:
    """PAD for rows of similar length, SPLIT otherwise. PAD needs neighbouring slots, which it reads as one block."""
    first = rows.slots[0]
    if rows.slots != tuple(range(first, first + len(rows.slots))):
        return Form.SPLIT
    if wanted is not Form.AUTO:
        return Form.SPLIT if wanted is Form.KEYS else wanted
    padded = len(rows.slots) * rows.longest * max(rows.counts)
    live = sum((past + count) * count for past, count in zip(rows.past, rows.counts, strict=True))
    return Form.PAD if live >= padded * (1 - WASTE_BEFORE_SPLIT) else Form.SPLIT


def plan(
    rows: RaggedRows, mask: Tensor | None, group: int, device: torch.device, form: Form = Form.AUTO
) -> AttentionPlan:
    """`mask` is [N, S] bool, S = rows.longest, or [N, H, S] numbers to be added to the scores of each head.

    None where plain causality is enough: one new token in each of rows of equal length, or rows without a past.
    """
    form = choose_form(rows, form)
    causal = mask is None and max(rows.counts) > 1
    assert not causal or not any(rows.past), "tokens that follow a past need a mask"
    if form is Form.SPLIT:
        return AttentionPlan(rows, form, group, rows.longest, causal, _split_masks(rows, mask, group), None)
    place = pad_index(rows, device) if len(set(rows.counts)) > 1 else None
    if mask is None:
        return AttentionPlan(rows, form, group, rows.longest, causal, (None,), place)
    seen = mask[place.clamp(min=0)] if place is not None else mask.unflatten(0, (len(rows.slots), -1))
    return AttentionPlan(rows, form, group, rows.longest, causal, (_folded(seen, group),), place)


def plan_across(
    slots: tuple[int, ...],
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    group: int,
    device: torch.device,
    form: Form = Form.AUTO,
) -> AttentionPlan:
    """Cross-attention: `counts[i]` queries that all see the `lengths[i]` keys of `slots[i]`, whatever their order."""
    rows = RaggedRows(slots, tuple(n - count for n, count in zip(lengths, counts, strict=True)), counts)
    form = choose_form(rows, form)
    if form is Form.SPLIT:
        return AttentionPlan(rows, form, group, rows.longest, False, (None,) * len(slots), None)
    place = pad_index(rows, device) if len(set(counts)) > 1 else None
    if len(set(lengths)) == 1:
        return AttentionPlan(rows, form, group, rows.longest, False, (None,), place)
    ends = torch.tensor(lengths, device=device)[:, None]
    seen = torch.arange(rows.longest, device=device) < ends
    return AttentionPlan(rows, form, group, rows.longest, False, (seen[:, None, None],), place)


def attend(
    query: Tensor,  # [N, Hq, D] new tokens of all rows, packed
    keys: Tensor,  # [R, Hk, C, D] every row of the cache, the new tokens written already
    values: Tensor,  # [R, Hk, C, Dv]
    plan: AttentionPlan,
    scale: Scale,
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys."""
    run = attend_padded if plan.form is Form.PAD else attend_split
    return run(query, keys, values, plan, scale)


def attend_whole(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: Scale) -> Tensor:
    """[B, Hq, T, D] over [B, Hk, S, D] -> [B, Hq, T, Dv], with a mask of bools or of numbers to be added."""
    return softmax_product(query, keys, values, mask, scale, query.shape[1] // keys.shape[1], False)


def attend_split(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: Scale) -> Tensor:
    """One product a row: nothing padded, nothing read beyond a row's own keys."""
    rows, parts, start = plan.rows, [], 0
    for slot, past, count, seen in zip(rows.slots, rows.past, rows.counts, plan.seen, strict=True):
        tokens, length = slice(start, start + count), past + count
        k, v = keys[slot : slot + 1, :, :length], values[slot : slot + 1, :, :length]
        parts.append(_attend_block(query[None, tokens], k, v, seen, scale, plan)[0])
        start += count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def attend_padded(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: Scale) -> Tensor:
    """One batched product: queries padded to the longest draft, keys read up to the longest row."""
    first, batch, longest = plan.rows.slots[0], len(plan.rows.slots), plan.longest
    if batch < keys.shape[0]:
        keys, values = keys.narrow(0, first, batch), values.narrow(0, first, batch)
    k, v = keys.narrow(2, 0, longest), values.narrow(2, 0, longest)
    if plan.place is None:
        block = query.view(batch, -1, *query.shape[1:])
        return _attend_block(block, k, v, plan.seen[0], scale, plan).flatten(0, 1)
    out = _attend_block(query[plan.place.clamp(min=0)], k, v, plan.seen[0], scale, plan)
    return out[plan.place >= 0]


def pad_index(rows: RaggedRows, device: torch.device) -> Tensor:
    """[B, T] place of token t of row b among the packed tokens, -1 past the row's count."""
    counts = torch.tensor(rows.counts, device=device)[:, None]
    starts = counts.cumsum(0) - counts
    step = torch.arange(max(rows.counts), device=device)
    return torch.where(step < counts, starts + step, -1)


def _split_masks(rows: RaggedRows, mask: Tensor | None, group: int) -> tuple[Tensor | None, ...]:
    if mask is None:
        return (None,) * len(rows.slots)
    parts = mask.split(list(rows.counts))
    return tuple(_folded(part[None, ..., :length], group) for part, length in zip(parts, rows.lengths, strict=True))


def _folded(seen: Tensor, group: int) -> Tensor:
    """[B, T, S] -> [B, 1, group * T, S]: every query head of a group sees the same. One query a row is not folded.

    A bias of each head, [B, T, H, S], becomes [B, H, T, S].
    """
    if seen.ndim == 4:
        assert group == 1, "a bias of each head is only known where no heads share their keys"
        return seen.transpose(1, 2)
    batch, width, span = seen.shape
    if width == 1:
        return seen[:, None]
    return seen[:, None, None].expand(batch, 1, group, width, span).reshape(batch, 1, group * width, span)


def _attend_block(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: Scale, plan: AttentionPlan
) -> Tensor:
    """[B, T, Hq, D] queries, [B, Hk, S, D] keys -> [B, T, Hq, Dv]."""
    batch, width, heads, size = query.shape
    group = plan.group
    # A CPU's attention shares keys by itself; on a GPU it copies them for every query head once there is a mask.
    if plan.causal or (width == 1 and query.device.type == "cpu"):
        out = softmax_product(query.transpose(1, 2), keys, values, seen, scale, group, plan.causal and width > 1)
        return out.transpose(1, 2)
    # The query heads of one key head are folded into the query axis: one key read serves the whole group.
    folded = query.view(batch, width, heads // group, group, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = softmax_product(folded, keys, values, seen, scale, 1, False)
    return out.view(batch, heads // group, group, width, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


def softmax_product(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: Scale, group: int, causal: bool = False
) -> Tensor:
    """[B, H, M, D] queries over [B, Hk, S, D] keys, H = group * Hk."""
    if scale.softcap is None and scale.sinks is None:
        out: Tensor = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=scale.factor, is_causal=causal, enable_gqa=group > 1
        )
        return out
    if causal:
        seen = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    return attend_by_hand(query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), seen, scale)


def attend_by_hand(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: Scale) -> Tensor:
    """[B, H, M, D] over [B, H, S, D]: also what torch's attention cannot do, capped scores and sinks."""
    scores = query @ keys.transpose(-1, -2) * scale.factor
    if scale.softcap is not None:
        scores = torch.tanh(scores / scale.softcap) * scale.softcap
    if seen is not None:
        scores = scores + seen if seen.is_floating_point() else scores.masked_fill(~seen, -torch.inf)
    if scale.sinks is None:
        return torch.softmax(working(scores), dim=-1).to(values.dtype) @ values
    batch, heads, rows, _ = scores.shape  # where heads are folded, `rows` holds a whole group of them
    sink = scale.sinks.view(1, heads, -1, 1).expand(batch, heads, -1, rows * heads // scale.sinks.numel())
    scores = torch.cat([scores, sink.reshape(batch, heads, rows, 1)], dim=-1)
    return torch.softmax(working(scores), dim=-1)[..., :-1].to(values.dtype) @ values
