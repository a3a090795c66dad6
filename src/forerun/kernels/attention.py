"""Attention over ragged rows in Triton; the reference is `math.ragged_attention`.

One program takes one key head of one row and all the queries that share it: the heads of a group and the new tokens
are folded into one axis, so a key is read once for all of them. Rows stop at their own length (SPLIT), or all at the
longest (PAD, to compare with). Where that makes too few programs to keep every multiprocessor reading, or leaves the
longest row to work alone at the end, each row's keys are cut into chunks of one size for all rows (KEYS): a program
leaves its maximum, sum and weighted values behind, and a second, small kernel merges them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.kernels.attention_shape import TUNING, Shape, Tuning, choose_shape, power
from forerun.math.attention import Form, Scale
from forerun.math.ragged_attention import Reach, check_bias

LARGEST_SIZE = 256  # of a head
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG2E = tl.constexpr(1.4426950408889634)


def attend_ragged(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, Dv]
    reach: Reach,
    scale: Scale,
    form: Form = Form.AUTO,
    tuning: Tuning = TUNING,
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys; no waiting for the device, so a CUDA graph can hold it."""
    if reason := why_not(query, keys, values):
        raise InvalidArgument(f"the attention kernel cannot take this: {reason}; use forerun.ops.attend_ragged")
    check_bias(reach, scale)
    shape = choose_shape(query, keys, reach, form, tuning)
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    parts = _parts(query, values, shape)
    _launch(out, parts, query, keys, values, reach, scale, shape, tuning)
    if shape.splits > 1:
        _launch_merge(out, parts, reach, scale, shape)
    return out


def why_not(query: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if query.dtype not in DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        return f"queries of {query.dtype}, keys of {keys.dtype}, values of {values.dtype}"
    if max(query.shape[-1], values.shape[-1]) > LARGEST_SIZE:
        return f"heads of size {max(query.shape[-1], values.shape[-1])}, more than {LARGEST_SIZE}"
    if any(t.stride(-1) != 1 for t in (query, keys, values)):
        return "numbers of a head that do not lie side by side"
    return None


def _parts(query: Tensor, values: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Room for weighted values [N, Hq, S, Dv], maxima and sums [N, Hq, S, 2] of the chunks."""
    if shape.splits == 1:
        return query, query  # never touched
    place = (*query.shape[:2], shape.splits)
    return tuple(query.new_empty(*place, n, dtype=torch.float32) for n in (values.shape[-1], 2))  # type: ignore[return-value]


def _launch(
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    scale: Scale,
    shape: Shape,
    tuning: Tuning,
) -> None:
    batch, heads, tree, bias = reach.slots.shape[0], keys.shape[1], reach.tree, scale.by_distance
    _attend_kernel[(heads, batch * shape.query_blocks, shape.splits)](
        out, *parts, query, keys, values, reach.slots, reach.lengths, reach.starts,
        query if scale.sinks is None else scale.sinks, query if tree is None else tree, query if bias is None else bias,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], 0 if tree is None else tree.stride(0),
        scale.factor, scale.softcap or 1.0, reach.window, reach.longest, shape.chunk, shape.splits, shape.query_blocks,
        0 if bias is None else bias.shape[1],
        HEADS=query.shape[1], GROUP=query.shape[1] // heads, SIZE=query.shape[-1], VALUE_SIZE=values.shape[-1],
        BLOCK_SIZE=power(query.shape[-1]), BLOCK_VALUE_SIZE=power(values.shape[-1]),
        BLOCK_QUERIES=shape.block_queries, BLOCK_KEYS=shape.block_keys, IS_PART=shape.splits > 1,
        PADDED=shape.form is Form.PAD, WINDOWED=reach.window > 0, CAPPED=scale.softcap is not None,
        HAS_SINKS=scale.sinks is not None, HAS_TREE=tree is not None, ACROSS=reach.across,
        HAS_BIAS=bias is not None,
        UPCAST=_interpreted(query),
        EARLY=shape.early, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def _launch_merge(out: Tensor, parts: tuple[Tensor, Tensor], reach: Reach, scale: Scale, shape: Shape) -> None:
    batch, heads = reach.slots.shape[0], out.shape[1]
    _merge_kernel[(heads, reach.most_tokens, batch)](
        out, *parts, reach.lengths, reach.starts, out if scale.sinks is None else scale.sinks,
        reach.window, shape.chunk, shape.splits, HEADS=heads, VALUE_SIZE=out.shape[-1],
        BLOCK_VALUE_SIZE=power(out.shape[-1]), BLOCK_SPLITS=power(shape.splits), WINDOWED=reach.window > 0,
        HAS_SINKS=scale.sinks is not None, EARLY=shape.early, num_warps=2 if shape.splits <= 16 else 4,
        **({"launch_pdl": True} if shape.early else {}),
    )  # fmt: skip


def _interpreted(query: Tensor) -> bool:
    """Triton's interpreter multiplies bfloat16 as if it were whole numbers."""
    return query.device.type == "cpu" and query.dtype is torch.bfloat16


# What changes from pass to pass must not have a kernel compiled anew for every kind of number.
CHANGING = ("window", "longest", "splits", "query_blocks", "tree_token", "distances")
UNALIGNED = ("slots_ptr", "lengths_ptr", "starts_ptr", "sinks_ptr", "tree_ptr", "bias_ptr")


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def _attend_kernel(
    out_ptr,  # [N, Hq, Dv], where there is one chunk
    part_ptr,  # [N, Hq, S, Dv] float32, weighted values of each chunk, where there are more
    mass_ptr,  # [N, Hq, S, 2] float32, maximum (times log2 e) and sum of each chunk
    q_ptr,  # [N, Hq, D]
    k_ptr,  # [R, Hk, C, D]
    v_ptr,  # [R, Hk, C, Dv]
    slots_ptr,  # [B] int32
    lengths_ptr,  # [B] int32
    starts_ptr,  # [B + 1] int32
    sinks_ptr,  # [Hq]
    tree_ptr,  # [N, W] bool
    bias_ptr,  # [Hq, L] float32
    q_token,
    q_head,
    k_slot,
    k_head,
    k_place,
    v_slot,
    v_head,
    v_place,
    tree_token,
    factor,
    softcap,
    window,
    longest,
    chunk,
    splits,
    query_blocks,
    distances,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_PART: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    ACROSS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (key head, row and block of its queries, chunk of its keys)."""
    if EARLY:  # the next kernel may start, and waits for the results itself
        tl.extra.cuda.gdc_launch_dependents()
    key_head = tl.program_id(0)
    row = tl.program_id(1) // query_blocks
    block = tl.program_id(1) % query_blocks
    split = tl.program_id(2)

    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    past = length - count

    # Which keys this program reads. The chunks that exist are a matter of the row alone, so that the merging kernel
    # can work it out again; a query block that sees nothing of its chunk leaves an empty mass.
    low = 0
    high = length
    if WINDOWED:
        low = tl.maximum(past - window + 1, 0)
    if PADDED:
        high = longest
    begin = low + split * chunk
    if (block * BLOCK_QUERIES >= count * GROUP) | (begin >= high):
        return
    if not (HAS_TREE or ACROSS):
        first_token = (block * BLOCK_QUERIES) // GROUP
        last_token = tl.minimum((block * BLOCK_QUERIES + BLOCK_QUERIES - 1) // GROUP, count - 1)
        if WINDOWED:
            low = tl.maximum(past + first_token - window + 1, 0)
        if not PADDED:
            high = tl.maximum(past + last_token, 0) + 1
    low = tl.maximum(low, begin)
    high = tl.minimum(high, begin + chunk)

    # Query m of the block is head m % GROUP of token m // GROUP.
    m = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = m < count * GROUP
    token = m // GROUP
    head = key_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_SIZE)
    e = tl.arange(0, BLOCK_VALUE_SIZE)
    q_place = (start + token).to(tl.int64) * q_token + head * q_head
    q = tl.load(q_ptr + q_place[:, None] + d[None, :], mask=is_query[:, None] & (d < SIZE)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    position = tl.maximum(past + token, 0)  # what lies before the row's beginning sees its first key
    if HAS_TREE:
        depth = tl.zeros([BLOCK_QUERIES], dtype=tl.int32)
        for other in range(count):
            is_kin = tl.load(tree_ptr + (start + token).to(tl.int64) * tree_token + other, mask=is_query, other=0)
            depth += is_kin.to(tl.int32)
        position = past + depth - 1

    peak = tl.full([BLOCK_QUERIES], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_QUERIES], dtype=tl.float32)
    mixed = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE_SIZE], dtype=tl.float32)
    k_row = k_ptr + slot * k_slot + key_head * k_head
    v_row = v_ptr + slot * v_slot + key_head * v_head

    for first in range(low, high, BLOCK_KEYS):
        n = first + tl.arange(0, BLOCK_KEYS)
        is_key = n < high
        k = tl.load(
            k_row + n.to(tl.int64)[:, None] * k_place + d[None, :],
            mask=is_key[:, None] & (d < SIZE)[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if CAPPED:
            scores = softcap * (2.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2E / softcap))) - 1.0)
        if HAS_BIAS:
            far = tl.minimum(tl.maximum(position[:, None] - n[None, :], 0), distances - 1)
            scores += tl.load(bias_ptr + head[:, None] * distances + far, mask=is_query[:, None], other=0.0)
        scores = scores * LOG2E
        if HAS_TREE:
            kin = (n - past)[None, :]
            among_new = (kin >= 0) & (kin < count) & is_query[:, None]
            place = (start + token).to(tl.int64)[:, None] * tree_token + kin
            sees = (kin < 0) | (tl.load(tree_ptr + place, mask=among_new, other=0).to(tl.int32) != 0)
            if WINDOWED:
                sees = sees & ((kin >= 0) | (n[None, :] > position[:, None] - window))
        elif ACROSS:
            sees = (n < length)[None, :]
        else:
            sees = n[None, :] <= position[:, None]
            if WINDOWED:
                sees = sees & (n[None, :] > position[:, None] - window)
        scores = tl.where(sees & is_key[None, :], scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no infinity minus itself
        shrink = tl.exp2(peak - base)
        shares = tl.exp2(scores - base[:, None])
        mass = mass * shrink + tl.sum(shares, 1)
        mixed = mixed * shrink[:, None]
        v = tl.load(
            v_row + n.to(tl.int64)[:, None] * v_place + e[None, :],
            mask=is_key[:, None] & (e < VALUE_SIZE)[None, :],
            other=0.0,
        )
        if PADDED:  # what lies past a row's keys may be anything, and nothing times NaN is NaN
            v = tl.where((n < length)[:, None], v, 0.0)
        if UPCAST:
            mixed = tl.dot(shares, v.to(tl.float32), mixed, input_precision="ieee")
        else:
            mixed = tl.dot(shares.to(v.dtype), v, mixed, input_precision="ieee")
        peak = higher

    o_place = (start + token).to(tl.int64) * HEADS + head
    is_out = is_query[:, None] & (e < VALUE_SIZE)[None, :]
    if IS_PART:
        place = o_place * splits + split
        tl.store(part_ptr + place[:, None] * VALUE_SIZE + e[None, :], mixed, mask=is_out)
        tl.store(mass_ptr + place * 2, peak, mask=is_query)
        tl.store(mass_ptr + place * 2 + 1, mass, mask=is_query)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(peak, sink)
            mixed = mixed * tl.exp2(peak - top)[:, None]
            mass = mass * tl.exp2(peak - top) + tl.exp2(sink - top)
        made = mixed / mass[:, None]
        tl.store(out_ptr + o_place[:, None] * VALUE_SIZE + e[None, :], made.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def _merge_kernel(
    out_ptr,  # [N, Hq, Dv]
    part_ptr,  # [N, Hq, S, Dv] float32
    mass_ptr,  # [N, Hq, S, 2] float32
    lengths_ptr,  # [B] int32
    starts_ptr,  # [B + 1] int32
    sinks_ptr,  # [Hq]
    window,
    chunk,
    splits,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (query head, new token, row): chunks that were never written are never read."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    token = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    if token >= count:
        return
    length = tl.load(lengths_ptr + row)
    low = 0
    if WINDOWED:
        low = tl.maximum(length - count - window + 1, 0)
    split = tl.arange(0, BLOCK_SPLITS)
    is_made = (split < splits) & (low + split * chunk < length)
    place = ((start + token).to(tl.int64) * HEADS + head) * splits + split
    peak = tl.load(mass_ptr + place * 2, mask=is_made, other=float("-inf"))
    mass = tl.load(mass_ptr + place * 2 + 1, mask=is_made, other=0.0)
    top = tl.max(peak, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weight = tl.exp2(peak - top)
    total = tl.sum(weight * mass, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    e = tl.arange(0, BLOCK_VALUE_SIZE)
    part = tl.load(
        part_ptr + place[:, None] * VALUE_SIZE + e[None, :],
        mask=is_made[:, None] & (e < VALUE_SIZE)[None, :],
        other=0.0,
    )
    made = tl.sum(part * weight[:, None], 0) / total
    where = ((start + token).to(tl.int64) * HEADS + head) * VALUE_SIZE + e
    tl.store(out_ptr + where, made.to(out_ptr.dtype.element_ty), mask=e < VALUE_SIZE)
