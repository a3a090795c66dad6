"""Drawing the next token: sums over tiles of what is left, then the tile, then the token. Device code of `verify`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import NEGATIVE, TILE, log_probability, pick, pick_goal, probability, warped
from forerun.kernels.philox import FINAL, uniform
from forerun.kernels.verify.acceptance import (
    BLOCK_RULE,
    GREEDY_RULE,
    KEPT_WIDTH,
    LOGITS,
    MIXED,
    NOBODY,
    acceptance,
    at,
    block_count,
    block_weights,
    count_kept,
    draft_row,
    draft_side,
    left_over,
    target_logits,
    target_side,
)

HEAD = tl.constexpr(3)  # entries of a result before the log-probabilities


@triton.jit
def sum_kernel(
    # the target
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
    # the draft
    tokens, tokens_stride, lengths, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
    points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
    # the summaries
    peaks, masses, thresholds, bests, num_chunks, positions, q_start, q_positions,
    # the rest
    seed, request_id, round_, uniforms, alpha, beta,
    out,  # [B, 3 + P] int64: kept tokens, next token, finite, log-probabilities of what is emitted (float64 bits)
    split_peaks,  # [B, S * LOOPS] float32, the sigmoid rule's
    sums,  # [B, P or 1, T] float64, of tiles
    counters,  # [B] int32, how many programs of a row are done: 0 before and after
    num_tiles, num_splits,
    CHUNKS: tl.constexpr, KP: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, LOOPS: tl.constexpr,
    KIND: tl.constexpr, RULE: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr,
    CUT: tl.constexpr, GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and LOOPS x TILES tiles: judge the draft, then sum what the next token is drawn from.

    With LAST the last program of a row to finish draws; else `pick_kernel` does.
    """
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, KP)
    if PDL and not SUMMED:  # nothing of this verification came before
        cuda.gdc_wait()
    if PDL and not (LAST and SUMMED):
        cuda.gdc_launch_dependents()
    length = tl.load(lengths + b)
    token = tl.load(tokens + b * tokens_stride + i, mask=i < positions - 1, other=0)
    key, request, turn = tl.load(seed + b), tl.load(request_id + b), tl.load(round_ + b)
    p_row, known, x, heat = target_logits(
        b, i, length, token, p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, positions
    )
    odds, final = acceptance(i, key, request, turn, RULE), uniform(key, request, turn, i.to(tl.int64), FINAL)
    EARLY: tl.constexpr = KEPT or not SUMMED or (KIND != LOGITS and KIND != MIXED)  # the draft waits for no summaries
    if PDL and not EARLY:
        cuda.gdc_wait()
    q_row, log_q, q_shift, q_divisor, q_log_mass, q_threshold, q_best, point, pointed = draft_side(
        b, i, length, token, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
        points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
        peaks, masses, thresholds, bests, num_chunks, q_start, q_positions,
        CHUNKS, KIND, RULE, KEPT, REDUCED, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    if PDL and EARLY and SUMMED:
        cuda.gdc_wait()
    log_p, peak, shift, divisor, log_mass, threshold, best = target_side(
        b, i, length, token, known, x, heat, peaks, masses, thresholds, bests, num_chunks, positions,
        CHUNKS, RULE, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    finite = tl.min(tl.where(i <= length, (peak - peak == 0).to(tl.int32), 1), axis=0)
    weight = tl.full((), 1.0, tl.float64)
    if RULE == GREEDY_RULE:
        n = tl.min(tl.where((log_p == 0.0) & (i < length), NOBODY, i), axis=0)
    elif RULE == BLOCK_RULE:
        n = tl.program_id(2)  # sums are wanted at every position
        weight = at(block_weights(i, length, log_p, log_q, KP), i, n)
    else:
        n = count_kept(i, length, log_p, log_q, odds, alpha, beta, RULE)
    if RULE != BLOCK_RULE:
        if s == 0:
            shown = log_p
            if not SUMMED:
                shown = tl.full(log_p.shape, float("nan"), tl.float32)
            store_head(b, i, n, finite, shown, out, positions)
    if RULE == GREEDY_RULE:
        tl.store(out + b * (HEAD + positions) + 1, at(best, i, n).to(tl.int64))
        tl.store(out + b * (HEAD + positions) + HEAD + n, tl.full((), 0, tl.int64))
    else:
        refused = n < length
        # here and not where they are needed: whoever draws needs them again
        p_start, q_first = p_logits + at(p_row, i, n) * p_stride, q_logits + at(q_row, i, n) * q_stride
        shift_n, log_mass_n, threshold_n = at(shift, i, n), at(log_mass, i, n), at(threshold, i, n)
        best_n, point_n, q_shift_n = at(best, i, n), at(point, i, n), at(q_shift, i, n)
        q_log_mass_n, q_threshold_n, q_best_n = at(q_log_mass, i, n), at(q_threshold, i, n), at(q_best, i, n)
        if n <= length:
            place = b * num_tiles
            if RULE == BLOCK_RULE:
                place = (b * positions + n) * num_tiles
            sparse = (b * sparse_positions + n) * num_sparse
            for step in range(LOOPS):
                tile = (s * LOOPS + step) * TILES + tl.arange(0, TILES)
                column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
                inside = column < p_vocab
                row = tl.load(p_start + column, mask=inside, other=NEGATIVE).to(tl.float32)
                y, own, wanted = draft_row(column, inside & refused, q_first, q_vocab, places, pointed, KIND, REDUCED)
                w = warped(row, shift_n, divisor, SCALED)
                if not SUMMED:
                    if not refused:  # the sigmoid rule's bonus: relative to the peak of these tiles
                        log_mass_n = tl.max(tl.max(tl.where(w == w, w, NEGATIVE), axis=1), axis=0)
                    tl.store(split_peaks + b * num_splits * LOOPS + s * LOOPS + step, log_mass_n)
                value = left_over(
                    column, inside, row, w, divisor, log_mass_n, threshold_n, best_n, refused,
                    y, own, wanted, q_shift_n, q_divisor, q_log_mass_n, q_threshold_n, q_best_n, point_n,
                    pointed, sparse_ids + sparse, sparse_probs + sparse, num_sparse, weight, alpha, beta,
                    KIND, RULE, SCALED, CUT, GREEDY,
                )  # fmt: skip
                tl.store(sums + place + tile, tile_sums(value, TILES), mask=tile < num_tiles)
        if LAST:
            tl.debug_barrier()  # the count is one thread's; what the others stored comes before it
            programs = num_splits
            if RULE == BLOCK_RULE:
                programs = num_splits * positions
            if tl.atomic_add(counters + b, 1) == programs - 1:
                conclude(
                    b, i, n, length, log_p, log_q, finite, final, key, request, turn, uniforms,
                    p_logits, p_row, p_stride, p_vocab, shift, divisor, log_mass, threshold, best,
                    q_logits, q_row, q_stride, q_vocab, q_shift, q_divisor, q_log_mass, q_threshold, q_best, places,
                    point, pointed, sparse_ids, sparse_probs, num_sparse, sparse_positions, alpha, beta,
                    out, kept, positions, split_peaks, sums, num_tiles, num_splits,
                    KP, ALL, TILES, LOOPS, KIND, RULE, REDUCED, SCALED, CUT, GREEDY, SUMMED, GIVEN,
                )  # fmt: skip
                tl.store(counters + b, 0)


@triton.jit
def pick_kernel(
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
    tokens, tokens_stride, lengths, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
    points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
    peaks, masses, thresholds, bests, num_chunks, positions, q_start, q_positions,
    seed, request_id, round_, uniforms, alpha, beta,
    out, split_peaks, sums, counters, num_tiles, num_splits,
    CHUNKS: tl.constexpr, KP: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, LOOPS: tl.constexpr,
    KIND: tl.constexpr, RULE: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr,
    CUT: tl.constexpr, GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: from the tiles' sums to the token. ALL covers all tiles, TILES those a program summed."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, KP)
    length = tl.load(lengths + b)
    token = tl.load(tokens + b * tokens_stride + i, mask=i < positions - 1, other=0)
    key, request, turn = tl.load(seed + b), tl.load(request_id + b), tl.load(round_ + b)
    p_row, known, x, heat = target_logits(
        b, i, length, token, p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, positions
    )
    final = uniform(key, request, turn, i.to(tl.int64), FINAL)
    EARLY: tl.constexpr = KEPT or not SUMMED or (KIND != LOGITS and KIND != MIXED)
    if PDL and not EARLY:
        cuda.gdc_wait()
    q_row, log_q, q_shift, q_divisor, q_log_mass, q_threshold, q_best, point, pointed = draft_side(
        b, i, length, token, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
        points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
        peaks, masses, thresholds, bests, num_chunks, q_start, q_positions,
        CHUNKS, KIND, RULE, KEPT, REDUCED, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    if PDL and EARLY:
        cuda.gdc_wait()
    log_p, peak, shift, divisor, log_mass, threshold, best = target_side(
        b, i, length, token, known, x, heat, peaks, masses, thresholds, bests, num_chunks, positions,
        CHUNKS, RULE, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    finite = tl.min(tl.where(i <= length, (peak - peak == 0).to(tl.int32), 1), axis=0)
    n = 0
    if RULE != BLOCK_RULE:
        n = tl.load(out + b * (HEAD + positions)).to(tl.int32)
    conclude(
        b, i, n, length, log_p, log_q, finite, final, key, request, turn, uniforms,
        p_logits, p_row, p_stride, p_vocab, shift, divisor, log_mass, threshold, best,
        q_logits, q_row, q_stride, q_vocab, q_shift, q_divisor, q_log_mass, q_threshold, q_best, places,
        point, pointed, sparse_ids, sparse_probs, num_sparse, sparse_positions, alpha, beta,
        out, kept, positions, split_peaks, sums, num_tiles, num_splits,
        KP, ALL, TILES, LOOPS, KIND, RULE, REDUCED, SCALED, CUT, GREEDY, SUMMED, GIVEN,
    )  # fmt: skip


@triton.jit
def tile_sums(values, TILES: tl.constexpr):
    """Float64 sums of [TILES, TILE] weights; of each four neighbours in float32, whose rounding averages out."""
    if values.dtype == tl.float32:
        fours = tl.reshape(values, [TILES, TILE // 4, 4])
        values = tl.sum(fours, axis=2).to(tl.float64)
    return tl.sum(values, axis=1)


@triton.jit
def conclude(
    b, i, n, length, log_p, log_q, finite, final, key, request, turn, uniforms,
    p_logits, p_row, p_stride, p_vocab, shift, divisor, log_mass, threshold, best,
    q_logits, q_row, q_stride, q_vocab, q_shift, q_divisor, q_log_mass, q_threshold, q_best, places,
    point, pointed, sparse_ids, sparse_probs, num_sparse, sparse_positions, alpha, beta,
    out, kept, positions, split_peaks, sums, num_tiles, num_splits,
    KP: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, LOOPS: tl.constexpr, KIND: tl.constexpr,
    RULE: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, GREEDY: tl.constexpr,
    SUMMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """All sums of a row are there: under the block rule decide what is kept, then draw."""
    tile = tl.arange(0, ALL)
    weight = tl.full((), 1.0, tl.float64)
    if RULE == BLOCK_RULE:
        place = (b * positions + i[:, None]) * num_tiles + tile[None, :]
        there = (i <= length)[:, None] & (tile < num_tiles)[None, :]
        every = tl.load(sums + place, mask=there, other=0.0, cache_modifier=".cg")
        weights = block_weights(i, length, log_p, log_q, KP)
        n = block_count(i, length, weights, tl.sum(every, axis=1), key, request, turn)
        weight = at(weights, i, n)
        sum_ = tl.sum(tl.where((i == n)[:, None], every, 0.0), axis=0)
        store_head(b, i, n, finite, log_p, out, positions)
    else:
        sum_ = tl.load(sums + b * num_tiles + tile, mask=tile < num_tiles, other=0.0, cache_modifier=".cg")
    refused = n < length
    log_mass_n = at(log_mass, i, n)
    if not SUMMED:
        peaks = split_peaks + b * num_splits * LOOPS + tile // TILES
        local = tl.load(peaks, mask=tile < num_tiles, other=NEGATIVE, cache_modifier=".cg")
        log_mass_n = tl.max(local, axis=0)
        if not refused:
            sum_ *= tl.exp((local - log_mass_n).to(tl.float64))
    if GIVEN:
        u = tl.load(uniforms + b)
    else:
        u = at(final, i, n)
    sparse = (b * sparse_positions + n) * num_sparse
    finish(
        b, n, u, sum_, refused, p_logits + at(p_row, i, n) * p_stride, at(shift, i, n), divisor, log_mass_n,
        at(threshold, i, n), at(best, i, n), p_vocab, q_logits + at(q_row, i, n) * q_stride, at(q_shift, i, n),
        q_divisor, at(q_log_mass, i, n), at(q_threshold, i, n), at(q_best, i, n), q_vocab, places,
        at(point, i, n), pointed, sparse_ids + sparse, sparse_probs + sparse, num_sparse, weight, alpha, beta,
        out, kept, positions, KIND, RULE, REDUCED, SCALED, CUT, GREEDY, SUMMED, GIVEN,
    )  # fmt: skip


@triton.jit
def store_head(b, i, n, finite, log_p, out, positions):
    """All of the result but the next token."""
    head = out + b * (HEAD + positions)
    bits = tl.where(i < n, log_p, 0.0).to(tl.float64).to(tl.int64, bitcast=True)
    tl.store(head + HEAD + i, bits, mask=(i < positions) & (i != n))
    tl.store(head, n.to(tl.int64))
    tl.store(head + 2, finite.to(tl.int64))


@triton.jit
def finish(
    b, n, u, sums, refused, p_row, shift, divisor, log_mass, threshold, best, vocab,
    q_row, q_shift, q_divisor, q_log_mass, q_threshold, q_best, q_vocab, places,
    point, is_point, sparse_ids, sparse_probs, num_sparse, weight, alpha, beta, out, kept, positions,
    KIND: tl.constexpr, RULE: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Draw: the tile from the sums, then the token inside it. Where rounding left nothing after a refusal, from p."""
    tile, rest, total = pick(sums, u)
    nothing = refused & (total <= 0.0)
    if nothing:
        tile, rest = _pick_tile(p_row, u, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
    refused = refused & (total > 0.0)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab
    x = tl.load(p_row + column, mask=inside, other=NEGATIVE).to(tl.float32)
    y, own, wanted = draft_row(column, inside & refused, q_row, q_vocab, places, is_point, KIND, REDUCED)
    w = warped(x, shift, divisor, SCALED)
    value = left_over(
        column, inside, x, w, divisor, log_mass, threshold, best, refused,
        y, own, wanted, q_shift, q_divisor, q_log_mass, q_threshold, q_best,
        point, is_point, sparse_ids, sparse_probs, num_sparse, weight, alpha, beta,
        KIND, RULE, SCALED, CUT, GREEDY,
    )  # fmt: skip
    entry, _ = pick_goal(value.to(tl.float64), rest)
    head = out + b * (HEAD + positions)
    log_p = tl.full((), float("nan"), tl.float64)
    if SUMMED:
        log_p = _drawn_log(entry, w, column, log_mass, threshold, best, CUT, GREEDY)
    else:
        if not refused:
            log_p = _drawn_log(entry, w, column, log_mass, threshold, best, CUT, GREEDY) - tl.log(total)
        tl.store(head + 2, (total - total == 0).to(tl.int64))
    tl.store(head + 1, (tile * TILE + entry).to(tl.int64))
    tl.store(head + HEAD + n, log_p.to(tl.int64, bitcast=True))
    if GIVEN:  # a draft's own draw: what its verification needs of the row
        kept += b * KEPT_WIDTH
        tl.store(kept, shift)
        tl.store(kept + 1, log_mass)
        tl.store(kept + 2, threshold)
        tl.store(kept + 3, best.to(tl.float32))
        tl.store(kept + 4, log_p.to(tl.float32))


@triton.jit
def _drawn_log(entry, w, column, log_mass, threshold, best, CUT: tl.constexpr, GREEDY: tl.constexpr):
    log_p = log_probability(w, column, log_mass, threshold, best, CUT, GREEDY)
    return at(log_p, tl.arange(0, TILE), entry).to(tl.float64)


@triton.jit
def _pick_tile(
    row, u, shift, divisor, log_mass, threshold, best, vocab, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """The tile of p in which u falls, one tile after the other: as good as never needed."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        total += _tile_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
    goal, before = u * total, tl.full((), 0.0, tl.float64)
    tile, rest = tl.full((), 0, tl.int32), goal
    for start in range(0, vocab, TILE):
        own = _tile_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
        here = (own > 0) & (before <= goal)
        tile, rest = tl.where(here, start // TILE, tile), tl.where(here, goal - before, rest)
        before += own
    return tile, rest


@triton.jit
def _tile_sum(
    row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, TILE)
    x = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
    p = probability(warped(x, shift, divisor, SCALED), column, log_mass, threshold, best, CUT, GREEDY)
    return tl.sum(tl.where(column < vocab, p, 0.0).to(tl.float64), axis=0)
