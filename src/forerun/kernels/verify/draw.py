"""Drawing the next token: sums over tiles of what is left, then the tile, then the token. Device code of `verify`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import (
    COUNTS,
    NEGATIVE,
    NONE,
    TILE,
    RowLaw,
    counted,
    log_probability,
    pick,
    pick_goal,
    probability,
    warped,
)
from forerun.kernels.philox import FINAL, uniform
from forerun.kernels.verify.acceptance import (
    BLOCK_RULE,
    GREEDY_RULE,
    KEPT_WIDTH,
    LOGITS,
    MIXED,
    acceptance,
    at,
    block_count,
    block_weights,
    count_kept,
    count_usable,
    draft_at,
    draft_row,
    draft_side,
    law_at,
    left_over,
    target_logits,
    target_side,
)

HEAD = tl.constexpr(3)  # entries of a result before the log-probabilities
CHANGING = (*COUNTS, "first")


@triton.jit(do_not_specialize=CHANGING)
def sum_kernel(
    p, q,  # LogitRows
    p_positions, p_index, q_positions, q_index,  # see `counted`
    draft,  # DraftTensors
    summaries,  # Summaries
    num_chunks, first,  # of the summaries: chunks of a row, and the row at which the draft's begin
    keys,  # KeyRows
    bounds,  # alpha, beta of the sigmoid rule
    work,  # Workspace
    CASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and LOOPS x TILES tiles: verify the draft, then sum what the next token is drawn from.

    With LAST the last program of a row to finish draws; else `pick_kernel` does.
    """
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    i = tl.arange(0, CASE.POSITIONS)
    if PDL and not CASE.SUMMED:  # nothing of this verification came before
        cuda.gdc_wait()
    if PDL and not (CASE.LAST and CASE.SUMMED):
        cuda.gdc_launch_dependents()
    length = tl.load(draft.lengths + b)
    token = tl.load(draft.tokens + b * draft.tokens_stride + i, mask=i < p.positions - 1, other=0)
    key, request, turn = tl.load(keys.seed + b), tl.load(keys.request_id + b), tl.load(keys.round + b)
    row, known, x, heat = target_logits(b, i, length, token, p)
    odds = acceptance(i, key, request, turn, CASE.RULE)
    final = uniform(key, request, turn, i.to(tl.int64), FINAL)
    EARLY: tl.constexpr = CASE.KEPT or not CASE.SUMMED or (CASE.KIND != LOGITS and CASE.KIND != MIXED)
    if PDL and not EARLY:  # the draft's law needs the summaries
        cuda.gdc_wait()
    q_law, log_q, point, is_point = draft_side(b, i, length, token, q, draft, summaries, num_chunks, first, CASE)
    if PDL and EARLY and CASE.SUMMED:
        cuda.gdc_wait()
    p_law, log_p, peak = target_side(
        b, i, length, token, row, known, x, heat, summaries, num_chunks, p.positions, CASE
    )  # fmt: skip
    num_usable = count_usable(i, length, peak)
    length = tl.minimum(length, num_usable)
    weight = tl.full((), 1.0, tl.float64)
    if CASE.RULE == GREEDY_RULE:
        n = tl.min(tl.where((log_p == 0.0) & (i < length), NONE, i), axis=0)
    elif CASE.RULE == BLOCK_RULE:
        n = tl.program_id(2)  # sums are wanted at every position
        weight = at(block_weights(i, length, log_p, log_q, CASE.POSITIONS), i, n)
    else:
        n = count_kept(i, length, log_p, log_q, odds, bounds, CASE.RULE)
    if CASE.RULE != BLOCK_RULE:
        if s == 0:
            shown = log_p
            if not CASE.SUMMED:
                shown = tl.full(log_p.shape, float("nan"), tl.float32)
            store_head(b, i, n, num_usable, shown, work.out, p.positions)
    if CASE.RULE == GREEDY_RULE:
        head = work.out + b * (HEAD + p.positions)
        tl.store(head + 1, at(p_law.best, i, n).to(tl.int64))
        tl.store(head + HEAD + n, tl.full((), 0, tl.int64))
    else:
        refused = n < length
        # here and not where they are needed: whoever draws needs them again
        p_n, q_n = law_at(p_law, p, i, n), draft_at(q_law, q, draft, point, is_point, b, i, n)
        log_mass = p_n.log_mass
        if n <= length:
            place = b * work.num_tiles
            if CASE.RULE == BLOCK_RULE:
                place = (b * p.positions + n) * work.num_tiles
            for step in range(CASE.LOOPS):
                tile = (s * CASE.LOOPS + step) * CASE.TILES + tl.arange(0, CASE.TILES)
                column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
                inside = column < p.vocab
                logits = tl.load(p_n.row + column, mask=inside, other=NEGATIVE).to(tl.float32)
                y, q_place, wanted = draft_row(column, inside & refused, q_n, q.vocab, draft.places, CASE)
                w = warped(logits, p_n.shift, p_n.divisor, CASE.SCALED)
                if not CASE.SUMMED:
                    if not refused:  # the sigmoid rule's bonus: relative to the peak of these tiles
                        log_mass = tl.max(tl.max(tl.where(w == w, w, NEGATIVE), axis=1), axis=0)
                    split_peaks = work.split_peaks + b * work.num_splits * CASE.LOOPS
                    tl.store(split_peaks + s * CASE.LOOPS + step, log_mass)
                value = left_over(
                    column, inside, logits, w, with_log_mass(p_n, log_mass), refused, y, q_place, wanted, q_n,
                    weight, bounds, CASE,
                )  # fmt: skip
                tl.store(work.sums + place + tile, tile_sums(value, CASE.TILES), mask=tile < work.num_tiles)
        if CASE.LAST:
            tl.debug_barrier()  # the count is one thread's; what the others stored comes before it
            programs = work.num_splits
            if CASE.RULE == BLOCK_RULE:
                programs = work.num_splits * p.positions
            if tl.atomic_add(work.counters + b, 1) == programs - 1:
                conclude(
                    b, i, n, length, log_p, log_q, num_usable, final, key, request, turn, keys.uniforms,
                    p, p_law, q, q_law, draft, point, is_point, bounds, work, CASE,
                )  # fmt: skip
                tl.store(work.counters + b, 0)


@triton.jit(do_not_specialize=CHANGING)
def pick_kernel(
    p, q, p_positions, p_index, q_positions, q_index, draft, summaries, num_chunks, first, keys, bounds, work,
    CASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: from the tiles' sums to the token. ALL covers all tiles, TILES those a program summed."""
    b = tl.program_id(0).to(tl.int64)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    i = tl.arange(0, CASE.POSITIONS)
    length = tl.load(draft.lengths + b)
    token = tl.load(draft.tokens + b * draft.tokens_stride + i, mask=i < p.positions - 1, other=0)
    key, request, turn = tl.load(keys.seed + b), tl.load(keys.request_id + b), tl.load(keys.round + b)
    row, known, x, heat = target_logits(b, i, length, token, p)
    final = uniform(key, request, turn, i.to(tl.int64), FINAL)
    EARLY: tl.constexpr = CASE.KEPT or not CASE.SUMMED or (CASE.KIND != LOGITS and CASE.KIND != MIXED)
    if PDL and not EARLY:
        cuda.gdc_wait()
    q_law, log_q, point, is_point = draft_side(b, i, length, token, q, draft, summaries, num_chunks, first, CASE)
    if PDL and EARLY:
        cuda.gdc_wait()
    p_law, log_p, peak = target_side(
        b, i, length, token, row, known, x, heat, summaries, num_chunks, p.positions, CASE
    )  # fmt: skip
    num_usable = count_usable(i, length, peak)
    length = tl.minimum(length, num_usable)
    n = 0
    if CASE.RULE != BLOCK_RULE:
        n = tl.load(work.out + b * (HEAD + p.positions)).to(tl.int32)
    conclude(
        b, i, n, length, log_p, log_q, num_usable, final, key, request, turn, keys.uniforms,
        p, p_law, q, q_law, draft, point, is_point, bounds, work, CASE,
    )  # fmt: skip


@triton.jit
def with_log_mass(law, log_mass):
    return RowLaw(law.row, law.shift, law.divisor, log_mass, law.threshold, law.best)


@triton.jit
def tile_sums(values, TILES: tl.constexpr):
    """Float64 sums of [TILES, TILE] weights; of each four neighbours in float32, whose rounding averages out."""
    if values.dtype == tl.float32:
        fours = tl.reshape(values, [TILES, TILE // 4, 4])
        values = tl.sum(fours, axis=2).to(tl.float64)
    return tl.sum(values, axis=1)


@triton.jit
def conclude(
    b, i, n, length, log_p, log_q, num_usable, final, key, request, turn, uniforms,
    p, p_law, q, q_law, draft, point, is_point, bounds, work, CASE: tl.constexpr,
):  # fmt: skip
    """All sums of a row are there: under the block rule decide what is kept, then draw."""
    tile = tl.arange(0, CASE.ALL)
    weight = tl.full((), 1.0, tl.float64)
    if CASE.RULE == BLOCK_RULE:
        place = (b * p.positions + i[:, None]) * work.num_tiles + tile[None, :]
        there = (i <= length)[:, None] & (tile < work.num_tiles)[None, :]
        every = tl.load(work.sums + place, mask=there, other=0.0, cache_modifier=".cg")
        weights = block_weights(i, length, log_p, log_q, CASE.POSITIONS)
        n = block_count(i, length, weights, tl.sum(every, axis=1), key, request, turn)
        weight = at(weights, i, n)
        sums = tl.sum(tl.where((i == n)[:, None], every, 0.0), axis=0)
        store_head(b, i, n, num_usable, log_p, work.out, p.positions)
    else:
        place = b * work.num_tiles + tile
        sums = tl.load(work.sums + place, mask=tile < work.num_tiles, other=0.0, cache_modifier=".cg")
    refused = n < length
    log_mass = at(p_law.log_mass, i, n)
    if not CASE.SUMMED:
        peaks = work.split_peaks + b * work.num_splits * CASE.LOOPS + tile // CASE.TILES
        local = tl.load(peaks, mask=tile < work.num_tiles, other=NEGATIVE, cache_modifier=".cg")
        log_mass = tl.max(local, axis=0)
        if not refused:
            sums *= tl.exp((local - log_mass).to(tl.float64))
    if CASE.GIVEN:
        u = tl.load(uniforms + b)
    else:
        u = at(final, i, n)
    p_n, q_n = law_at(p_law, p, i, n), draft_at(q_law, q, draft, point, is_point, b, i, n)
    head = work.out + b * (HEAD + p.positions)
    finish(
        n, u, sums, refused, with_log_mass(p_n, log_mass), p.vocab, q_n, q.vocab, draft.places, weight, bounds, head,
        draft.kept + b * KEPT_WIDTH, CASE,
    )  # fmt: skip


@triton.jit
def store_head(b, i, n, num_usable, log_p, out, positions):
    """All of the result but the next token."""
    head = out + b * (HEAD + positions)
    bits = tl.where(i < n, log_p, 0.0).to(tl.float64).to(tl.int64, bitcast=True)
    tl.store(head + HEAD + i, bits, mask=(i < positions) & (i != n))
    tl.store(head, n.to(tl.int64))
    tl.store(head + 2, (n < num_usable).to(tl.int64))


@triton.jit
def finish(
    n, u, sums, refused, p, vocab, q, q_vocab, places, weight, bounds, head, kept, CASE: tl.constexpr
):  # fmt: skip
    """Draw: the tile from the sums, then the token inside it. Where rounding left nothing after a refusal, from p."""
    tile, rest, total = pick(sums, u)
    nothing = refused & (total <= 0.0)
    is_law = total - total == 0
    if nothing:
        tile, rest, mass = _pick_tile(u, p, vocab, CASE)
        is_law = (mass > 0.0) & (mass - mass == 0)
    refused = refused & (total > 0.0)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab
    x = tl.load(p.row + column, mask=inside, other=NEGATIVE).to(tl.float32)
    y, q_place, wanted = draft_row(column, inside & refused, q, q_vocab, places, CASE)
    w = warped(x, p.shift, p.divisor, CASE.SCALED)
    value = left_over(column, inside, x, w, p, refused, y, q_place, wanted, q, weight, bounds, CASE)
    entry, _ = pick_goal(value.to(tl.float64), rest)
    log_p = tl.full((), float("nan"), tl.float64)
    if CASE.SUMMED:
        log_p = _drawn_log(entry, w, column, p, CASE)
    else:
        if not refused:
            log_p = _drawn_log(entry, w, column, p, CASE) - tl.log(total)
        tl.store(head + 2, is_law.to(tl.int64))
    tl.store(head + 1, (tile * TILE + entry).to(tl.int64))
    tl.store(head + HEAD + n, log_p.to(tl.int64, bitcast=True))
    if CASE.GIVEN:  # a draft's own draw: what its verification needs of the row
        tl.store(kept, p.shift)
        tl.store(kept + 1, p.log_mass)
        tl.store(kept + 2, p.threshold)
        tl.store(kept + 3, p.best.to(tl.float32))
        tl.store(kept + 4, log_p.to(tl.float32))


@triton.jit
def _drawn_log(entry, w, column, law, CASE: tl.constexpr):
    log_p = log_probability(w, column, law, CASE.CUT, CASE.GREEDY)
    return at(log_p, tl.arange(0, TILE), entry).to(tl.float64)


@triton.jit
def _pick_tile(u, law, vocab, CASE: tl.constexpr):
    """The tile of p in which u falls, where in it, and p's mass, one tile after the other: as good as never needed."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        total += _tile_sum(start, law, vocab, CASE)
    goal, before = u * total, tl.full((), 0.0, tl.float64)
    tile, rest = tl.full((), 0, tl.int32), goal
    for start in range(0, vocab, TILE):
        mass = _tile_sum(start, law, vocab, CASE)
        here = (mass > 0) & (before <= goal)
        tile, rest = tl.where(here, start // TILE, tile), tl.where(here, goal - before, rest)
        before += mass
    return tile, rest, total


@triton.jit
def _tile_sum(start, law, vocab, CASE: tl.constexpr):
    column = start + tl.arange(0, TILE)
    x = tl.load(law.row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
    p = probability(warped(x, law.shift, law.divisor, CASE.SCALED), column, law, CASE.CUT, CASE.GREEDY)
    return tl.sum(tl.where(column < vocab, p, 0.0).to(tl.float64), axis=0)
