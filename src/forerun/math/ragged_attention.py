"""Attention of new tokens over rows whose lengths only the device knows, in torch, one row at a time.

`math.attention` takes its rows from the host and a mask of any kind; a kernel wants neither. Here a row is three
numbers in device tensors, and what a query sees is a rule: everything up to itself, perhaps no further back than a
window, perhaps a tree among the new tokens. `kernels.attention.attend` has the same function and must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.attention import Form, Scale, attend_by_hand
from forerun.math.precision import working
from forerun.math.prompt_attention import attend_prompt
from forerun.math.transfer import to_device
from forerun.types import RaggedRows

PROMPT = 2048  # new tokens of a row from which on torch's attention is the faster one: below, its launches cost more
EVEN = 0.8  # live keys over padded ones from which on rows count as equally long


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys each new token sees. Tensors are read on the device; host numbers only bound and divide the work."""

    slots: Tensor  # [B] int32, where each row lives in the cache, or its row of the table
    lengths: Tensor  # [B] int32, keys of each row, the new ones included
    starts: Tensor  # [B + 1] int32, row b's new tokens are starts[b] .. starts[b + 1] - 1 of the packed ones
    most_tokens: int  # no row has more new tokens
    longest: int  # no row has more keys; the cache's capacity where that is not known
    window: int = 0  # keys a query sees, its own included; 0 for all
    # [N, W] bool: whether new token i sees new token j of its own row, itself included; None: all before it. The
    # position of a token, from which a window counts, is the number of its ancestors past the old keys.
    tree: Tensor | None = None
    num_keys: int | None = None  # of all rows together, where the host knows it
    across: bool = False  # cross-attention: every query sees all keys of its row, which are another text's
    # [slots, most blocks] int32, where rows lie in blocks: the block of each row's i-th keys; None: rows in one piece
    table: Tensor | None = None

    @property
    def is_even(self) -> bool | None:
        """Whether the rows are about as long as each other; None where only the device knows."""
        return None if self.num_keys is None else self.num_keys >= EVEN * self.longest * self.slots.shape[0]

    def __post_init__(self) -> None:
        if self.window < 0:
            raise InvalidArgument(f"window={self.window}: give the number of keys a query sees, or 0 for all")
        if self.tree is None:
            return
        if self.tree.shape[1] < self.most_tokens:
            raise InvalidArgument(
                f"a tree mask {self.tree.shape[1]} wide cannot describe {self.most_tokens} new tokens of a row"
            )
        if 0 < self.window < self.most_tokens:
            raise InvalidArgument(
                f"a window of {self.window} keys is narrower than a tree of {self.most_tokens} tokens; "
                "draft fewer tokens, or a chain"
            )


def reach_of(rows: RaggedRows, device: torch.device, window: int = 0, table: Tensor | None = None) -> Reach:
    """The same rows with their numbers on the device: one small copy a pass."""
    lengths = rows.lengths
    starts = [0]
    for count in rows.counts:
        starts.append(starts[-1] + count)
    packed = to_device(torch.tensor([*rows.slots, *lengths, *starts], dtype=torch.int32), device)
    slots, ends, places = packed.split([len(lengths), len(lengths), len(starts)])
    return Reach(slots, ends, places, max(rows.counts), rows.longest, window, num_keys=sum(lengths), table=table)


def attend_ragged(
    query: Tensor,  # [N, Hq, D] new tokens of all rows, packed
    keys: Tensor,  # [R, Hk, C, D] every row of the cache, or every block, the new tokens written already
    values: Tensor,  # [R, Hk, C, Dv]
    reach: Reach,
    scale: Scale,
    form: Form = Form.AUTO,
    tail: tuple[Tensor, Tensor] | None = None,  # [N, Hq, T], [R, Hk, C, T]
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys. `form` is how a kernel goes about it, not what comes out.

    A `tail` is a second part of queries and keys, which lies apart; a kernel wants keys' first part as values then.
    """
    check_bias(reach, scale)
    if tail is not None:
        query, keys = torch.cat([query, tail[0]], dim=-1), torch.cat([keys, tail[1]], dim=-1)
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    starts = reach.starts.tolist()
    for row, (slot, length) in enumerate(zip(reach.slots.tolist(), reach.lengths.tolist(), strict=True)):
        tokens = slice(starts[row], starts[row + 1])
        k, v = (working(row_of(pool, slot, length, reach.table)) for pool in (keys, values))
        tree = None if reach.tree is None else reach.tree[tokens]
        count = tokens.stop - tokens.start
        if reach.across:
            seen = torch.ones(count, length, dtype=torch.bool, device=query.device)
        else:
            seen = visible(length, count, reach.window, tree, query.device)
        bias = _bias(scale.by_distance, length, count, tree) if scale.by_distance is not None else None
        out[tokens] = _attend_row(working(query[tokens]), k, v, seen, scale, bias).to(out.dtype)
    return out


def attend_prompts(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, D]
    rows: RaggedRows,
    table: Tensor | None,
    scale: Scale,
) -> Tensor:  # [N, Hq, D]
    """`attend_ragged` by torch's own attention, row by row: for prompts, whose many queries keep a device busy.

    Keys of a row whose blocks do not follow one another are copied out of them; see `why_not_prompts` for what torch's
    attention does not know.
    """
    outs, start = [], 0
    for place, (past, count) in enumerate(zip(rows.past, rows.counts, strict=True)):
        k, v = (keys_of(pool, rows, place, table)[None] for pool in (keys, values))
        q = query[start : start + count].transpose(0, 1)[None]
        outs.append(attend_prompt(q, k, v, past, scale.factor)[0].transpose(0, 1))
        start += count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def why_not_prompts(rows: RaggedRows, window: int, scale: Scale) -> str | None:
    """What keeps `attend_prompts` from these rows, in words; None where nothing does."""
    if min(rows.counts) < PROMPT:
        return f"rows of fewer than {PROMPT} new tokens"
    if 0 < window < rows.longest:
        return "a window"
    if scale.softcap is not None or scale.sinks is not None or scale.by_distance is not None:
        return "scores that are capped, biased or shared with a sink"
    return None


def keys_of(pool: Tensor, rows: RaggedRows, place: int, table: Tensor | None) -> Tensor:
    """[Hk, past + count, D] of the row at `place`: where they lie, if that is in one piece, or else a copy."""
    length, first = rows.past[place] + rows.counts[place], rows.first_blocks[place] if rows.first_blocks else None
    if first is None or table is None or type(pool) is not Tensor:
        return row_of(pool, rows.slots[place], length, table)
    start = first * pool.shape[2]
    return pool.transpose(1, 2).flatten(0, 1)[start : start + length].transpose(0, 1)


def row_of(pool: Tensor, slot: int, length: int, table: Tensor | None) -> Tensor:
    """[Hk, length, D] of one row, from a pool [R, Hk, C, D] of rows or of blocks, which are copied once."""
    if table is None:
        return pool[slot, :, :length]
    held = table[slot, : -(-length // pool.shape[2])].long()
    # Of rounded keys torch reads a wide copy, by indices alone.
    blocks = pool.transpose(1, 2).index_select(0, held) if type(pool) is Tensor else pool[held].transpose(1, 2)
    return blocks.flatten(0, 1)[:length].transpose(0, 1)


def check_bias(reach: Reach, scale: Scale) -> None:
    if scale.by_distance is not None and reach.across:
        raise InvalidArgument("a bias by distance is known within a text, not for another text's keys")


def visible(length: int, count: int, window: int, tree: Tensor | None, device: torch.device) -> Tensor:
    """[count, length] bool: which of a row's keys its `count` newest tokens see.

    A row may have fewer keys than new tokens: those that lie before its beginning see its first key.
    """
    past, key = length - count, torch.arange(length, device=device)
    if tree is None:
        position = _positions(past, count, device)
        seen = key <= position
    else:
        position = _tree_positions(past, count, tree)
        seen = torch.cat([torch.ones(count, past, dtype=torch.bool, device=device), tree[:, :count]], dim=1)
    if not window:
        return seen
    return seen & ((key > position - window) if tree is None else (key > position - window) | (key >= past))


def _positions(past: int, count: int, device: torch.device) -> Tensor:
    """[count, 1]"""
    return (past + torch.arange(count, device=device)).clamp(min=0)[:, None]


def _tree_positions(past: int, count: int, tree: Tensor) -> Tensor:
    """[count, 1]: behind the row's keys, each new token at its depth."""
    return past + tree[:, :count].sum(-1, keepdim=True) - 1


def _bias(by_distance: Tensor, length: int, count: int, tree: Tensor | None) -> Tensor:
    """[Hq, count, length]"""
    past, key = length - count, torch.arange(length, device=by_distance.device)
    if tree is None:
        place = _positions(past, count, by_distance.device)
    else:
        place = _tree_positions(past, count, tree)
        key = torch.cat([key[:past], place.flatten()])
    distance = place - key
    return by_distance[:, distance.clamp(0, by_distance.shape[1] - 1)]


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: Scale, bias: Tensor | None) -> Tensor:
    """[T, Hq, D] over [Hk, S, D], in float32 or float64."""
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    return attend_by_hand(query.transpose(0, 1)[None], keys[None], values[None], mask, scale)[0].transpose(0, 1)
