"""The nodes of a token tree in Triton: which child the target keeps at each, and what it says where none is kept.

What is decided at a node depends on no other node, so every node is a program, whether or not the walk comes by. A
refusal costs one pass over both laws; all that is kept of it are two numbers and the refused token (a stage), from
which any entry of what is left can be worked out again. Device code; `tree` launches it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import COUNTS, NEGATIVE, NONE, TILE, RowLaw, counted, divisor_of, pick, pick_goal, probability
from forerun.kernels.law import warped as warped_logits
from forerun.kernels.philox import ACCEPT, FINAL, uniform
from forerun.kernels.verify.acceptance import LOGITS, DraftAt, at, draft_row, merged_summary
from forerun.kernels.verify.draw import tile_sums

TOP = tl.constexpr(0)  # every row's siblings are its likeliest tokens
DRAWN = tl.constexpr(1)  # every row's were drawn
BOTH = tl.constexpr(2)  # as `TreeTensors.is_top` says
OUTCOME = tl.constexpr(3)  # numbers of a node's outcome: the kept child or -1, the token, whether there is a law
HEAD = tl.constexpr(3)  # entries of a result before the path: kept tokens, next token, whether finite
LEAST = tl.constexpr(1e-37)  # a mass below this is none: its inverse is no float32


class TreeTensors(NamedTuple):
    """A draft that is a tree, as `types.Draft` and `types.TreeShape` have it."""

    tokens: Any  # [B, M] int64
    tokens_stride: Any
    parents: Any  # [B, M] int64
    parents_stride: Any
    lengths: Any  # [B] int64
    is_top: Any  # [B] bool, only where `TreeCase.WAYS` is BOTH
    places: Any  # [V] int32, only where `TreeCase.REDUCED`


class TreeWork(NamedTuple):
    """What the launch writes; P = M + 1, the root among the nodes."""

    out: Any  # [B, HEAD + D] int64
    outcomes: Any  # [B, P, OUTCOME] int64
    sums: Any  # [B, P, T] float64, of tiles
    scales: Any  # [B, P, W, 2] float32: what each stage multiplies the target's law and the draft's by
    refused: Any  # [B, P, W] int64, the token of each stage
    counters: Any  # [B] int32, 0 before and after
    num_tiles: Any  # T


class TreeCase(NamedTuple):
    """What is known of such a verification when its kernel is compiled."""

    NODES: int  # a power of two, no less than the nodes of a tree
    CHUNKS: int  # a power of two, no less than the chunks of a row's summaries
    ALL: int  # a power of two, no less than all tiles
    TILES: int  # that a program takes at once
    WIDTH: int  # the most children of a node
    KIND: int  # of the draft's law: `acceptance.LOGITS`, or `NO_DRAFT` where no sibling was drawn
    WAYS: int  # `TOP` ...
    REDUCED: bool  # the draft's vocabulary is a part of the target's
    SCALED: bool  # some row has a temperature
    CUT: bool  # some row is truncated
    GREEDY: bool  # some row is greedy


class Stages(NamedTuple):
    """The refusals at a node so far."""

    scales: Any
    refused: Any


@triton.jit(do_not_specialize=(*COUNTS, "first", "deepest"))
def node_kernel(
    p, q,  # LogitRows
    p_positions, p_index, q_positions, q_index,  # see `law.counted`
    tree,  # TreeTensors
    summaries,  # Summaries
    num_chunks, first,  # of the summaries: chunks of a row, and the row at which the draft's begin
    keys,  # KeyRows
    work,  # TreeWork
    deepest,  # D: no node lies deeper
    CASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and node; the last of a row to finish walks."""
    b, n = tl.program_id(0).to(tl.int64), tl.program_id(1)  # n - 1 is the node, the root's is -1
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    if PDL:
        cuda.gdc_wait()
    length = tl.load(tree.lengths + b)
    if n <= length:
        kept, token, usable = decide(b, n, length, p, q, tree, summaries, num_chunks, first, keys, work, deepest, CASE)
        outcome = work.outcomes + (b * p.positions + n) * OUTCOME
        tl.store(outcome, kept.to(tl.int64))
        tl.store(outcome + 1, token)
        tl.store(outcome + 2, usable.to(tl.int64))
    tl.debug_barrier()  # the count is one thread's; what the others stored comes before it
    if tl.atomic_add(work.counters + b, 1) == p.positions - 1:
        walk(b, p.positions, work, deepest)
        tl.store(work.counters + b, 0)


@triton.jit
def decide(b, n, length, p, q, tree, summaries, num_chunks, first, keys, work, deepest, CASE: tl.constexpr):
    """The child that is kept at one node or -1, the token that is said there, and whether the target has a law."""
    i = tl.arange(0, CASE.NODES)
    parents = tree.parents + b * tree.parents_stride
    is_child = tl.load(parents + i, mask=i < length, other=-2) == n - 1
    tokens = tl.load(tree.tokens + b * tree.tokens_stride + i, mask=i < length, other=-1)
    above, depth = n, n * 0
    for _ in range(deepest):
        parent = tl.load(parents + above - 1, mask=above > 0, other=-1)
        depth += (above > 0).to(tl.int32)
        above = (parent + 1).to(tl.int32)
    seed, request, turn = tl.load(keys.seed + b), tl.load(keys.request_id + b), tl.load(keys.round + b)
    one = tl.arange(0, 1)
    last = tl.sum(uniform(seed, request, turn, depth.to(tl.int64) + one, FINAL), axis=0)
    node = b * p.positions + n
    law, peak = law_of_row(p, b, n, node, summaries, num_chunks, CASE)
    usable = peak - peak == 0
    stages = Stages(work.scales + node * CASE.WIDTH * 2, work.refused + node * CASE.WIDTH)
    sums = work.sums + node * work.num_tiles
    kept = tl.full((), -1, tl.int32)
    token = tl.full((), 0, tl.int64)
    number = tl.full((), 0, tl.int32)  # of refusals
    summed = tl.full((), 0, tl.int32)  # whether the sums are of what the last of them left
    draft = no_draft(law, tree)
    is_top = tl.full((), 1, tl.int32)
    if CASE.WAYS != TOP:
        eldest = tl.min(tl.where(is_child, i, NONE), axis=0)
        has_child = eldest < NONE
        eldest = tl.where(has_child, eldest, 0)
        drawn_from, _ = law_of_row(q, b, eldest, first + b * q.positions + eldest, summaries, num_chunks, CASE)
        draft = DraftAt(drawn_from, 0, 0, tree.tokens, tree.tokens, 0)
        is_top = tl.full((), 0, tl.int32)
        if CASE.WAYS == BOTH:
            is_top = tl.load(tree.is_top + b).to(tl.int32)
        child = tl.full((), -1, tl.int32)
        number_of = tl.minimum(tl.sum(is_child.to(tl.int32), axis=0), CASE.WIDTH)  # no more are judged than stages
        left = tl.where(usable & (is_top == 0), number_of, 0)
        while left > 0:
            child = tl.min(tl.where(is_child & (i > child), i, NONE), axis=0)
            x = at(tokens, i, child)
            there = (x + one >= 0) & (x + one < p.vocab)
            p_x, q_x = left_after(x + one, there, there, law, draft, q.vocab, tree.places, stages, number, CASE)
            wanted, offered = tl.sum(p_x.to(tl.float64), axis=0), tl.sum(q_x.to(tl.float64), axis=0)
            odds = tl.sum(uniform(seed, request, turn, child.to(tl.int64) + one, ACCEPT), axis=0)
            left -= 1
            if (offered > 0) & (odds * offered < wanted):
                kept, token, left = child, x, left * 0
            else:
                mass, rest = sum_tiles(
                    x, p.vocab, law, draft, q.vocab, tree.places, stages, number, 1, sums, work.num_tiles, CASE
                )  # fmt: skip
                summed = (mass > LEAST).to(tl.int32)
                scale, other = inverse_of(mass), inverse_of(rest)
                # where rounding left nothing, the target's law stays
                tl.store(stages.scales + 2 * number, tl.where(summed > 0, scale, -1.0))
                tl.store(stages.scales + 2 * number + 1, other)
                tl.store(stages.refused + number, x)
                number += 1
                tl.debug_barrier()  # for all threads to read
    if usable & (kept < 0):
        if CASE.GREEDY:
            if (is_top > 0) & (law.best >= 0):
                token = law.best.to(tl.int64)
            else:
                token = drawn(
                    last, p.vocab, law, draft, q.vocab, tree.places, stages, number, summed, sums, work.num_tiles, CASE
                )
        else:
            token = drawn(
                last, p.vocab, law, draft, q.vocab, tree.places, stages, number, summed, sums, work.num_tiles, CASE
            )
        if CASE.WAYS != DRAWN:
            foreseen = tl.min(tl.where(is_child & (tokens == token), i, NONE), axis=0)
            kept = tl.where((is_top > 0) & (foreseen < NONE), foreseen, kept)
    return kept, token, usable


@triton.jit
def law_of_row(rows, b, i, r, summaries, num_chunks, CASE: tl.constexpr):
    """The law at position `i` of batch row `b`, whose summary is row `r`; and its largest logit."""
    one = tl.arange(0, 1)
    heat = tl.load(rows.temperature + b)
    peak, shift, log_mass, threshold, best = merged_summary(r + one, one == 0, heat, summaries, num_chunks, CASE)
    divisor, _ = divisor_of(heat)
    start = rows.logits + tl.load(rows.index + b * rows.index_stride + i) * rows.stride
    shift, log_mass, threshold = tl.sum(shift, axis=0), tl.sum(log_mass, axis=0), tl.sum(threshold, axis=0)
    return RowLaw(start, shift, divisor, log_mass, threshold, tl.sum(best, axis=0)), tl.sum(peak, axis=0)


@triton.jit
def no_draft(law, tree):
    """Never read."""
    return DraftAt(law, 0, 0, tree.tokens, tree.tokens, 0)


@triton.jit
def left_after(column, inside, wanted, p, q, q_vocab, places, stages, number, CASE: tl.constexpr):
    """Both laws at `column` after `number` refusals (`math.siblings.without_replacement`); q's where it is wanted."""
    x = tl.load(p.row + column, mask=inside, other=NEGATIVE).to(tl.float32)
    y, place, wanted = draft_row(column, wanted, q, q_vocab, places, CASE)
    p_left = probability(warped_logits(x, p.shift, p.divisor, CASE.SCALED), column, p, CASE.CUT, CASE.GREEDY)
    p_left = tl.where(inside, p_left, 0.0)
    q_left = tl.zeros_like(p_left)
    if CASE.KIND == LOGITS:
        q_left = probability(
            warped_logits(y, q.law.shift, q.law.divisor, CASE.SCALED), place, q.law, CASE.CUT, CASE.GREEDY
        )
        q_left = tl.where(wanted & (q_left == q_left), q_left, 0.0)
        for stage in range(number):
            scale, other = tl.load(stages.scales + 2 * stage), tl.load(stages.scales + 2 * stage + 1)
            refused = tl.load(stages.refused + stage)
            p_left = tl.where(scale < 0, p_left, tl.maximum(p_left - q_left, 0.0) * scale)
            q_left = tl.where(column == refused, 0.0, q_left * other)
    return p_left, q_left


@triton.jit
def sum_tiles(
    x, p_vocab, p, q, q_vocab, places, stages, number, takes, sums, num_tiles, CASE: tl.constexpr
):  # fmt: skip
    """Leave the sums of all tiles of what is left after `number` refusals, or of token `x`, too, if it `takes`.

    Returns their total and what the draft's law then has without `x`.
    """
    total, rest = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, num_tiles, CASE.TILES):
        tile = start + tl.arange(0, CASE.TILES)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inside = column < p_vocab
        p_left, q_left = left_after(
            column, inside, inside & (takes + number > 0), p, q, q_vocab, places, stages, number, CASE
        )
        value = p_left
        if CASE.KIND == LOGITS:
            value = tl.where(takes > 0, tl.maximum(p_left - q_left, 0.0), p_left)
            rest += tl.sum(tile_sums(tl.where(column == x, 0.0, q_left), CASE.TILES), axis=0)
        each = tile_sums(value, CASE.TILES)
        tl.store(sums + tile, each, mask=tile < num_tiles)
        total += tl.sum(each, axis=0)
    return total, rest


@triton.jit
def inverse_of(mass):
    """What a law of this mass is multiplied by; 0 where there is as good as none."""
    return tl.where(mass > LEAST, 1.0 / tl.maximum(mass, LEAST), 0.0).to(tl.float32)


@triton.jit
def drawn(
    u, p_vocab, p, q, q_vocab, places, stages, number, summed, sums, num_tiles, CASE: tl.constexpr
):  # fmt: skip
    """A token of what is left after `number` refusals: the tile from the sums, then the token inside it."""
    if summed == 0:
        sum_tiles(-1, p_vocab, p, q, q_vocab, places, stages, number, 0, sums, num_tiles, CASE)
        tl.debug_barrier()
    every = tl.arange(0, CASE.ALL)
    tile, rest, _ = pick(tl.load(sums + every, mask=every < num_tiles, other=0.0), u)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < p_vocab
    p_left, q_left = left_after(
        column, inside, inside & (number > 0), p, q, q_vocab, places, stages, number - summed, CASE
    )
    if CASE.KIND == LOGITS:  # the last refusal's sums are not scaled
        p_left = tl.where(summed > 0, tl.maximum(p_left - q_left, 0.0), p_left)
    entry, _ = pick_goal(p_left.to(tl.float64), rest)
    return (tile * TILE + entry).to(tl.int64)


@triton.jit
def walk(b, positions, work, deepest):
    """From the root along kept children, once every node of the row is decided."""
    out = work.out + b * (HEAD + deepest)
    n, count = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    token, finite = tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)
    alive = tl.full((), 1, tl.int64)
    for depth in range(deepest + 1):
        outcome = work.outcomes + (b * positions + n) * OUTCOME
        kept = tl.load(outcome, cache_modifier=".cg")
        said = tl.load(outcome + 1, cache_modifier=".cg")
        usable = tl.load(outcome + 2, cache_modifier=".cg")
        token = tl.where(alive > 0, said, token)
        finite = tl.where(alive > 0, finite & usable, finite)
        alive = tl.where(kept >= 0, alive, 0)
        tl.store(out + HEAD + depth, tl.where(alive > 0, kept, -1), mask=depth < deepest)
        count += alive
        n = tl.where(alive > 0, kept + 1, n)
    tl.store(out, count)
    tl.store(out + 1, token)
    tl.store(out + 2, finite)
