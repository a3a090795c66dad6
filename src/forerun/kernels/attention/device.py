"""Device code of `attend`: which keys a program reads, what it makes of them, how pieces are merged.

Everything here is about one block of one key head's queries: new tokens and the heads of a group are one axis, query
m is head m % GROUP of token m // GROUP.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from forerun.kernels.law import LOG2_E
from forerun.kernels.linear.widen import pairs

TURN = tl.constexpr(2)  # key blocks whose time it takes to turn to another row: its queries, and waiting for its keys
MOST_UNSUMMED = tl.constexpr(2048)  # weights of a block that are summed by place first: sixteen registers a thread
# What changes from pass to pass must not have a kernel compiled anew for every kind of number. These stand for
# themselves: Triton 3.6 specialises whatever is inside a tuple.
CHANGING = (
    "window",
    "longest",
    "chunk",
    "splits",
    "balanced_splits",
    "batch",
    "query_blocks",
    "tree_token",
    "distances",
    "width",
    "num_queries",
)
UNALIGNED = ("slots_ptr", "table_ptr", "lengths_ptr", "starts_ptr", "sinks_ptr", "tree_ptr", "bias_ptr")


class Queries(NamedTuple):
    """[N, Hq, D] and its strides."""

    ptr: Any
    token: Any
    head: Any


class Pool(NamedTuple):
    """Keys [R, Hk, C, D] or values [R, Hk, C, Dv] of the cache, R rows or blocks, and their strides."""

    ptr: Any
    slot: Any
    head: Any
    place: Any


class AttentionCase(NamedTuple):
    """What is known of an attention when its kernel is compiled."""

    HEADS: int
    GROUP: int  # query heads of a key head
    SIZE: int  # of a head; pairs of dimensions where keys are rounded
    VALUE_SIZE: int
    BLOCK_SIZE: int
    BLOCK_VALUE_SIZE: int
    BLOCK_QUERIES: int
    BLOCK_KEYS: int
    BLOCK_ROWS: int
    IS_PART: bool  # rows may be cut
    BALANCED: bool  # and all rows' keys are divided evenly
    PADDED: bool
    WINDOWED: bool
    CAPPED: bool
    HAS_SINKS: bool
    HAS_TREE: bool
    ACROSS: bool
    HAS_BIAS: bool
    UPCAST: bool
    EARLY: bool
    PAGE: int  # keys of a block, a multiple of BLOCK_KEYS; 0: a row lies in one piece
    CAPACITY: int  # of keys that are rounded: places of a slot, or of a block; 0: they are not
    FLOATS: bool  # whether those are 8-bit floats, else whole numbers
    FAST: bool  # whether assembly widens them
    TAIL: int = 0  # numbers of a second part of queries and keys; values are then the first part of keys
    BLOCK_TAIL: int = 0


class AttentionOutputs(NamedTuple):
    """Where results go: whole ones, pieces of rows that are cut, and the sinks that are part of a whole one."""

    out_ptr: Any
    part_ptr: Any
    mass_ptr: Any
    sinks_ptr: Any
    num_queries: Any  # Q, places of a piece


class ScoreTerms(NamedTuple):
    """What becomes of the product of a query and a key, and which keys a query sees."""

    factor: Any
    softcap: Any
    window: Any
    tree_ptr: Any
    tree_token: Any
    bias_ptr: Any
    distances: Any


class Span(NamedTuple):
    """One row: its first new token, how many it has, its keys in all, and its slot in the cache."""

    start: Any
    count: Any
    length: Any
    slot: Any


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def attend_kernel(
    out_ptr,  # [N, Hq, Dv]
    part_ptr,  # [Hk, query blocks, pieces, Q, Dv] float32, weighted values of each piece of a row that is cut
    mass_ptr,  # [Hk, query blocks, pieces, Q, 2] float32, its maximum (times log2 e) and sum
    queries,  # Queries
    keys, values,  # Pool
    key_scale_ptr,  # [R, Hk, CAPACITY] float32
    value_scale_ptr,  # [R, Hk, CAPACITY] float32
    tail_queries,  # Queries
    tails,  # Pool
    slots_ptr,  # [B] int32
    table_ptr,  # [slots, width] int32
    lengths_ptr,  # [B] int32
    starts_ptr,  # [B + 1] int32
    sinks_ptr,  # [Hq]
    tree_ptr,  # [N, W] bool
    bias_ptr,  # [Hq, L] float32
    factor, softcap, tree_token, window, longest, chunk, splits, balanced_splits, batch, query_blocks, distances, width,
    num_queries,
    CASE: tl.constexpr,
):  # fmt: skip
    """One program per (key head, row and block of its queries, chunk of its keys), or per split of all rows' keys."""
    if CASE.EARLY:  # the next kernel may start, and waits for the results itself
        tl.extra.cuda.gdc_launch_dependents()
    outputs = AttentionOutputs(out_ptr, part_ptr, mass_ptr, sinks_ptr, num_queries)
    terms = ScoreTerms(factor, softcap, window, tree_ptr, tree_token, bias_ptr, distances)
    # All on the first axis: others end at 65535, and rows times blocks of a long prompt are soon more.
    KEY_HEADS: tl.constexpr = CASE.HEADS // CASE.GROUP
    key_head = tl.program_id(0) % KEY_HEADS
    place = tl.program_id(0) // KEY_HEADS
    block = place % query_blocks
    first_piece = (key_head * query_blocks + block) * (2 * balanced_splits if CASE.BALANCED else batch * splits)
    CHAIN: tl.constexpr = not (CASE.HAS_TREE or CASE.ACROSS)
    GRAIN: tl.constexpr = CASE.BLOCK_KEYS if CASE.PAGE else 1
    if CASE.BALANCED:
        split = place // query_blocks
        r = tl.arange(0, CASE.BLOCK_ROWS)
        starts, counts, lengths, lows, highs = spans(
            r, r < batch, block, lengths_ptr, starts_ptr, window, longest,
            CASE.GROUP, CASE.BLOCK_QUERIES, CASE.PADDED, CASE.WINDOWED, CHAIN, GRAIN,
        )  # fmt: skip
        slots = tl.load(slots_ptr + r, mask=r < batch, other=0)
        begins, ends, total, num_balanced = divided(lows, highs, balanced_splits, CASE.BLOCK_KEYS)
        at = total * split // num_balanced
        until = tl.where(split < num_balanced, total * (split + 1) // num_balanced, 0)
        while at < until:
            is_row = r == tl.sum((ends <= at).to(tl.int32), 0)
            begin, end = taken(begins, is_row), taken(ends, is_row)
            upto = tl.minimum(until, end)
            low, slot = taken(lows, is_row), taken(slots, is_row).to(tl.int64)
            high = tl.minimum(low + (upto - begin - TURN) * CASE.BLOCK_KEYS, taken(highs, is_row))
            attend_piece(
                outputs, queries, keys, values, key_scale_ptr, value_scale_ptr, tail_queries, tails, terms, table_ptr,
                width, key_head, block,
                Span(taken(starts, is_row), taken(counts, is_row), taken(lengths, is_row), slot),
                low + tl.maximum(at - begin - TURN, 0) * CASE.BLOCK_KEYS, high,
                first_piece + split * 2 + (at == begin).to(tl.int32), (at == begin) & (upto == end), CASE,
            )  # fmt: skip
            at = upto
    else:
        row = place // query_blocks
        split = tl.program_id(1)
        start, count, length, low, high = spans(
            row, row < batch, block, lengths_ptr, starts_ptr, window, longest,
            CASE.GROUP, CASE.BLOCK_QUERIES, CASE.PADDED, CASE.WINDOWED, CHAIN, GRAIN,
        )  # fmt: skip
        slot = tl.load(slots_ptr + row).to(tl.int64)
        begin = low + split * chunk
        if begin >= high:
            return
        attend_piece(
            outputs, queries, keys, values, key_scale_ptr, value_scale_ptr, tail_queries, tails, terms, table_ptr,
            width, key_head, block, Span(start, count, length, slot), begin, tl.minimum(high, begin + chunk),
            first_piece + row * splits + split, high - low <= chunk, CASE,
        )  # fmt: skip


@triton.jit
def spans(
    row, there, block, lengths_ptr, starts_ptr, window, longest,
    GROUP: tl.constexpr, BLOCK_QUERIES: tl.constexpr, PADDED: tl.constexpr, WINDOWED: tl.constexpr, CHAIN: tl.constexpr,
    GRAIN: tl.constexpr,
):  # fmt: skip
    """Of one row or several: first token, new tokens, keys, and [low, high) of the keys that this block's queries see.

    Nothing (low = high) where a row has no such queries. `low` is a multiple of GRAIN: tiles that begin there lie
    within one block each.
    """
    start = tl.load(starts_ptr + row, mask=there, other=0)
    count = tl.load(starts_ptr + row + 1, mask=there, other=0) - start
    length = tl.load(lengths_ptr + row, mask=there, other=0)
    past = length - count
    low = past * 0
    high = length
    first_token = 0
    if CHAIN:
        first_token = (block * BLOCK_QUERIES) // GROUP
        last_token = tl.minimum((block * BLOCK_QUERIES + BLOCK_QUERIES - 1) // GROUP, count - 1)
        high = tl.maximum(past + last_token, 0) + 1
    if WINDOWED:
        low = tl.maximum(past + first_token - window + 1, 0) // GRAIN * GRAIN
    if PADDED:
        high = past * 0 + longest
    high = tl.where(block * BLOCK_QUERIES < count * GROUP, high, low)
    return start, count, length, low, high


@triton.jit
def divided(lows, highs, balanced_splits, BLOCK_KEYS: tl.constexpr):
    """Key blocks of all rows one after the other, in equal splits: where rows begin and end, how many, how many splits.

    A row counts TURN blocks more than it has.
    """
    costs = tl.where(highs > lows, tl.cdiv(highs - lows, BLOCK_KEYS) + TURN, 0)
    ends = tl.cumsum(costs, 0)
    total = tl.sum(costs, 0)
    return ends - costs, ends, total, tl.maximum(tl.minimum(balanced_splits, total), 1)


@triton.jit
def split_of(at, total, num_balanced):
    """The split that holds block `at`: the last that begins at it or before."""
    return tl.cdiv((at + 1) * num_balanced, total) - 1


@triton.jit
def taken(numbers, is_row):
    return tl.sum(tl.where(is_row, numbers, 0), 0)


@triton.jit
def attend_piece(
    outputs, queries, keys, values, key_scale_ptr, value_scale_ptr, tail_queries, tails, terms, table_ptr, width,
    key_head, block, row, low, high, piece, is_whole, CASE: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) of one row: the result where these are all that its queries see, else a piece of it."""
    past = row.length - row.count
    m = block * CASE.BLOCK_QUERIES + tl.arange(0, CASE.BLOCK_QUERIES)
    is_query = m < row.count * CASE.GROUP
    token = m // CASE.GROUP
    head = key_head * CASE.GROUP + m % CASE.GROUP
    # Rounded keys and values come in pairs: dimensions 2 d and 2 d + 1 are one number of sixteen bits, because tensor
    # cores have a way to turn tiles of these, and none to turn bytes.
    EACH: tl.constexpr = 2 if CASE.CAPACITY else 1
    d = tl.arange(0, CASE.BLOCK_SIZE)
    e = tl.arange(0, CASE.BLOCK_VALUE_SIZE)
    q_place = (row.start + token).to(tl.int64) * queries.token + head * queries.head
    q_places = queries.ptr + q_place[:, None] + (d * EACH)[None, :]
    is_q = is_query[:, None] & (d < CASE.SIZE)[None, :]
    q = tl.load(q_places, mask=is_q, other=0.0)
    if CASE.UPCAST:
        q = q.to(tl.float32)
    if CASE.CAPACITY:
        other_q = tl.load(q_places + 1, mask=is_q, other=0.0)
        if CASE.UPCAST:
            other_q = other_q.to(tl.float32)
    if CASE.TAIL:
        f = tl.arange(0, CASE.BLOCK_TAIL)
        tail_place = (row.start + token).to(tl.int64) * tail_queries.token + head * tail_queries.head
        tail_q = tl.load(
            tail_queries.ptr + tail_place[:, None] + f[None, :], mask=is_query[:, None] & (f < CASE.TAIL)[None, :],
            other=0.0,
        )  # fmt: skip
        if CASE.UPCAST:
            tail_q = tail_q.to(tl.float32)

    position = tl.maximum(past + token, 0)  # what lies before the row's beginning sees its first key
    if CASE.HAS_TREE:
        depth = tl.full([CASE.BLOCK_QUERIES], 0, dtype=tl.int32)
        for other in range(row.count):
            place = (row.start + token).to(tl.int64) * terms.tree_token + other
            is_kin = tl.load(terms.tree_ptr + place, mask=is_query, other=0)
            depth += is_kin.to(tl.int32)
        position = past + depth - 1

    peak = tl.full([CASE.BLOCK_QUERIES], float("-inf"), dtype=tl.float32)
    # Where warps share a query's keys, their sum is an exchange between warps: once, at the end, if registers hold it.
    SUM_LAST: tl.constexpr = (
        CASE.BLOCK_QUERIES < CASE.BLOCK_KEYS and CASE.BLOCK_QUERIES * CASE.BLOCK_KEYS <= MOST_UNSUMMED
    )
    if SUM_LAST:
        mass = tl.full([CASE.BLOCK_QUERIES, CASE.BLOCK_KEYS], 0.0, dtype=tl.float32)
    else:
        mass = tl.full([CASE.BLOCK_QUERIES], 0.0, dtype=tl.float32)
    mixed = tl.full([CASE.BLOCK_QUERIES, CASE.BLOCK_VALUE_SIZE], 0.0, dtype=tl.float32)
    if CASE.CAPACITY:
        other_mixed = tl.full([CASE.BLOCK_QUERIES, CASE.BLOCK_VALUE_SIZE], 0.0, dtype=tl.float32)
    k_head = keys.ptr + key_head * keys.head
    v_head = values.ptr + key_head * values.head
    # The block of a tile is looked up while the tile before it is read: a load that another one of the same round of
    # the loop waits for would end Triton's pipelining of both.
    blocks = table_ptr + row.slot * width
    held = row.slot
    if CASE.PAGE:
        held = tl.load(blocks + low // CASE.PAGE).to(tl.int64)

    for first in range(low, high, CASE.BLOCK_KEYS):
        n = first + tl.arange(0, CASE.BLOCK_KEYS)
        is_key = n < high
        within = first % CASE.PAGE + tl.arange(0, CASE.BLOCK_KEYS) if CASE.PAGE else n
        v_row = v_head + held * values.slot
        k = tl.load(
            k_head + held * keys.slot + within.to(tl.int64)[:, None] * keys.place + d[None, :],
            mask=is_key[:, None] & (d < CASE.SIZE)[None, :],
            other=0.0,
        )
        if CASE.CAPACITY:
            at_scale = (held * (CASE.HEADS // CASE.GROUP) + key_head) * CASE.CAPACITY + within
            k_scale = tl.load(key_scale_ptr + at_scale, mask=is_key, other=0.0)
            k, other_k = pairs(k, q.dtype, CASE.FLOATS, CASE.FAST)
        if CASE.UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CASE.CAPACITY:
            scores = tl.dot(other_q, tl.trans(other_k), scores, input_precision="ieee") * k_scale[None, :]
        if CASE.TAIL:
            tail = tl.load(
                tails.ptr + key_head * tails.head + held * tails.slot + within.to(tl.int64)[:, None] * tails.place
                + f[None, :],
                mask=is_key[:, None] & (f < CASE.TAIL)[None, :],
                other=0.0,
            )  # fmt: skip
            if CASE.UPCAST:
                tail = tail.to(tl.float32)
            scores = tl.dot(tail_q, tl.trans(tail), scores, input_precision="ieee")
        if CASE.CAPPED:
            scores = terms.softcap * (
                2.0 / (1.0 + tl.exp2(scores * (terms.factor * -2.0 * LOG2_E / terms.softcap))) - 1.0
            )
        if CASE.HAS_BIAS:
            if not CASE.CAPPED:
                scores = scores * terms.factor
            stands = n
            if CASE.HAS_TREE:  # a new token's key stands at the token's depth
                depth_of_key = tl.full([CASE.BLOCK_KEYS], 0, dtype=tl.int32)
                is_new = (n >= past) & is_key
                for other in range(row.count):
                    place = (row.start + n - past).to(tl.int64) * terms.tree_token + other
                    depth_of_key += tl.load(terms.tree_ptr + place, mask=is_new, other=0).to(tl.int32)
                stands = tl.where(is_new, past + depth_of_key - 1, n)
            far = tl.minimum(tl.maximum(position[:, None] - stands[None, :], 0), terms.distances - 1)
            scores += tl.load(terms.bias_ptr + head[:, None] * terms.distances + far, mask=is_query[:, None], other=0.0)
        scores = scores * (LOG2_E if CASE.CAPPED or CASE.HAS_BIAS else terms.factor * LOG2_E)
        if CASE.HAS_TREE:
            kin = (n - past)[None, :]
            among_new = (kin >= 0) & (kin < row.count) & is_query[:, None]
            place = (row.start + token).to(tl.int64)[:, None] * terms.tree_token + kin
            sees = (kin < 0) | (tl.load(terms.tree_ptr + place, mask=among_new, other=0).to(tl.int32) != 0)
            if CASE.WINDOWED:
                sees = sees & ((kin >= 0) | (n[None, :] > position[:, None] - terms.window))
        elif CASE.ACROSS:
            sees = (n < row.length)[None, :]
        else:
            sees = n[None, :] <= position[:, None]
            if CASE.WINDOWED:
                sees = sees & (n[None, :] > position[:, None] - terms.window)
        scores = tl.where(sees & is_key[None, :], scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no infinity minus itself
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        if SUM_LAST:
            mass = mass * shrink[:, None] + weights
        else:
            mass = mass * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        if CASE.TAIL:
            v = k
        else:
            v = tl.load(
                v_row + within.to(tl.int64)[:, None] * values.place + e[None, :],
                mask=is_key[:, None] & (e < CASE.VALUE_SIZE)[None, :],
                other=0.0,
            )
        if CASE.PADDED:  # what lies past a row's keys may be anything, and nothing times NaN is NaN
            v = tl.where((n < row.length)[:, None], v, tl.zeros_like(v))
        if CASE.CAPACITY:
            is_there = is_key & (n < row.length)  # scales may be anything there, too
            weights = weights * tl.load(value_scale_ptr + at_scale, mask=is_there, other=0.0)[None, :]
            v, other_v = pairs(v, q.dtype, CASE.FLOATS, CASE.FAST)
            other_mixed = other_mixed * shrink[:, None]
            other_mixed = tl.dot(weights.to(other_v.dtype), other_v, other_mixed, input_precision="ieee")
        if CASE.UPCAST:
            mixed = tl.dot(weights, v.to(tl.float32), mixed, input_precision="ieee")
        else:
            mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="ieee")
        peak = higher
        if CASE.PAGE:
            following = first + CASE.BLOCK_KEYS
            held = tl.load(blocks + following // CASE.PAGE, mask=following < high, other=0).to(tl.int64)

    if SUM_LAST:
        mass = tl.sum(mass, 1)
    if CASE.CAPACITY:
        mixed = tl.reshape(tl.join(mixed, other_mixed), [CASE.BLOCK_QUERIES, 2 * CASE.BLOCK_VALUE_SIZE])
        e = tl.arange(0, 2 * CASE.BLOCK_VALUE_SIZE)
    VALUE_SIZE: tl.constexpr = CASE.VALUE_SIZE * EACH
    if CASE.IS_PART:
        if is_whole:
            finish(
                outputs.out_ptr, outputs.sinks_ptr, peak, mass, mixed, row.start + token, head, is_query,
                CASE.HEADS, VALUE_SIZE, CASE.HAS_SINKS,
            )  # fmt: skip
        else:
            place = piece.to(tl.int64) * outputs.num_queries + tl.arange(0, CASE.BLOCK_QUERIES)
            is_out = is_query[:, None] & (e < VALUE_SIZE)[None, :]
            tl.store(outputs.part_ptr + place[:, None] * VALUE_SIZE + e[None, :], mixed, mask=is_out)
            tl.store(outputs.mass_ptr + place * 2, peak, mask=is_query)
            tl.store(outputs.mass_ptr + place * 2 + 1, mass, mask=is_query)
    else:
        finish(
            outputs.out_ptr, outputs.sinks_ptr, peak, mass, mixed, row.start + token, head, is_query,
            CASE.HEADS, VALUE_SIZE, CASE.HAS_SINKS,
        )  # fmt: skip


@triton.jit
def finish(
    out_ptr, sinks_ptr, peak, mass, mixed, token, head, is_query,
    HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """What several queries have seen [Q, Dv], divided by its mass."""
    e = tl.arange(0, mixed.shape[1])
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(peak, sink)
        mixed = mixed * tl.exp2(peak - top)[:, None]
        mass = mass * tl.exp2(peak - top) + tl.exp2(sink - top)
    place = token.to(tl.int64) * HEADS + head
    result = (mixed / mass[:, None]).to(out_ptr.dtype.element_ty)
    is_out = is_query[:, None] & (e < VALUE_SIZE)[None, :]
    tl.store(out_ptr + place[:, None] * VALUE_SIZE + e[None, :], result, mask=is_out)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    out_ptr,  # [N, Hq, Dv]
    part_ptr,  # [Hk, query blocks, pieces, Q, Dv] float32
    mass_ptr,  # [Hk, query blocks, pieces, Q, 2] float32
    lengths_ptr,  # [B] int32
    starts_ptr,  # [B + 1] int32
    sinks_ptr,  # [Hq]
    window,
    longest,
    chunk,
    splits,
    balanced_splits,
    batch,
    query_blocks,
    num_queries,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BALANCED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHAIN: tl.constexpr,
    GRAIN: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program per (EACH query heads, new token, row). Which pieces there are is worked out again."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = tl.program_id(0) % (HEADS // EACH) * EACH
    head = first_head + tl.arange(0, EACH)
    key_head = first_head // GROUP
    token = tl.program_id(0) // (HEADS // EACH)
    row = tl.program_id(1)
    block = (token * GROUP + first_head % GROUP) // BLOCK_QUERIES
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    if BALANCED:
        r = tl.arange(0, BLOCK_ROWS)
        _, _, _, lows, highs = spans(
            r, r < batch, block, lengths_ptr, starts_ptr, window, longest, GROUP, BLOCK_QUERIES, False, WINDOWED, CHAIN,
            GRAIN,
        )  # fmt: skip
        begins, ends, total, num_balanced = divided(lows, highs, balanced_splits, BLOCK_KEYS)
        begin, end = taken(begins, r == row), taken(ends, r == row)
        first = split_of(begin, total, num_balanced)
        num_pieces = split_of(end - 1, total, num_balanced) - first + 1
    else:
        _, _, _, low, high = spans(
            row, row < batch, block, lengths_ptr, starts_ptr, window, longest, GROUP, BLOCK_QUERIES, False, WINDOWED,
            CHAIN, GRAIN,
        )  # fmt: skip
        first = row * splits
        num_pieces = tl.cdiv(high - low, chunk)
    if EARLY:  # before anyone leaves: this kernel may not end before the pieces are there
        tl.extra.cuda.gdc_wait()
    if (token >= count) | (num_pieces <= 1):
        return
    first_piece = (key_head * query_blocks + block) * (2 * balanced_splits if BALANCED else batch * splits)
    query = (token * GROUP + head % GROUP) % BLOCK_QUERIES
    e = tl.arange(0, BLOCK_VALUE_SIZE)
    peak = tl.full([EACH], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([EACH], dtype=tl.float32)
    mixed = tl.zeros([EACH, BLOCK_VALUE_SIZE], dtype=tl.float32)
    for begun in tl.range(0, num_pieces, BLOCK_PIECES, num_stages=1):
        i = begun + tl.arange(0, BLOCK_PIECES)
        piece = first + i
        if BALANCED:  # a split's first piece is the end of a row, its second the beginning of one
            piece = piece * 2 + (i == 0).to(tl.int32)
        place = (first_piece + piece).to(tl.int64)[:, None] * num_queries + query[None, :]
        is_there = (i < num_pieces)[:, None] & (head >= 0)[None, :]
        peaks = tl.load(mass_ptr + place * 2, mask=is_there, other=float("-inf"))
        masses = tl.load(mass_ptr + place * 2 + 1, mask=is_there, other=0.0)
        is_part = is_there[:, :, None] & (e < VALUE_SIZE)[None, None, :]
        parts = tl.load(part_ptr + place[:, :, None] * VALUE_SIZE + e[None, None, :], mask=is_part, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peaks - base[None, :])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weights * masses, 0)
        mixed = mixed * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = higher
    tokens = start + token + tl.zeros([EACH], dtype=tl.int32)
    finish(out_ptr, sinks_ptr, peak, mass, mixed, tokens, head, head >= 0, HEADS, VALUE_SIZE, HAS_SINKS)
