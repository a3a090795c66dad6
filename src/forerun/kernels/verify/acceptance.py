"""One row's judgement inside a kernel: the draft tokens' chances under both laws, and what is left of a law after q.

Everything about the K + 1 positions of a row is a vector of that length, so no program loops over positions or waits
for one load after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import (
    NEGATIVE,
    divisor_of,
    exponential,
    inverse,
    log_mass_of,
    log_probability,
    merged,
    probability,
    warped,
)
from forerun.kernels.philox import ACCEPT, uniform

NO_DRAFT = tl.constexpr(0)
LOGITS = tl.constexpr(1)
POINTS = tl.constexpr(2)
MIXED = tl.constexpr(3)  # logits in some rows, points in the others
SPARSE = tl.constexpr(4)

TOKEN = tl.constexpr(0)
BLOCK_RULE = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
GREEDY_RULE = tl.constexpr(3)  # all rows are greedy: no random number, nothing to sum

KEPT_WIDTH = tl.constexpr(5)  # of math.laws.Kept: peak, log mass, threshold, most likely place, log q of the draw
NOBODY = tl.constexpr(2147483647)


@triton.jit
def merged_summary(
    r, valid, temperature, peaks, masses, thresholds, bests, num_chunks, CHUNKS: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Peak, shift, log mass, threshold and most likely id of the rows `r` of the summaries, a vector each."""
    chunk = tl.arange(0, CHUNKS)
    place = r[:, None] * num_chunks + chunk[None, :]
    there = valid[:, None] & (chunk < num_chunks)[None, :]
    chunk_peak = tl.load(peaks + place, mask=there, other=NEGATIVE)
    divisor, plain = divisor_of(temperature)
    peak, mass = merged(chunk_peak, tl.load(masses + place, mask=there, other=0.0), divisor, 1)
    shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
    log_mass = log_mass_of(base, mass)
    threshold = tl.full(log_mass.shape, NEGATIVE, tl.float32)
    if CUT:
        threshold = tl.load(thresholds + r, mask=valid, other=NEGATIVE)
    best = tl.full(log_mass.shape, -1, tl.int32)
    if GREEDY:
        ids = tl.load(bests + place, mask=there, other=NOBODY)
        lowest = tl.min(tl.where(chunk_peak == peak[:, None], ids, NOBODY), axis=1)
        best = tl.where(temperature == 0.0, lowest, -1)
    return peak, shift, log_mass, threshold, best


@triton.jit
def score(z, alpha, beta):
    """The sigmoid of Wagner et al. instead of a probability: 0 below alpha, 1 above beta (`math.sigmoid`)."""
    inside = inverse(1.0 + exponential((alpha - z) * (1.0 / (beta - alpha))))  # one division a kernel, not one a token
    return tl.where(z < alpha, 0.0, tl.where(z > beta, 1.0, inside))


@triton.jit
def at(vector, i, place):
    """The entry of `vector` at `place`."""
    return tl.sum(tl.where(i == place, vector, tl.zeros_like(vector)), axis=0)


@triton.jit
def sigmoid_logit(x, w, divisor, threshold, SCALED: tl.constexpr, CUT: tl.constexpr):
    """What the sigmoid rule scores: the logit over the temperature, not shifted; -inf where the law cuts."""
    z = x
    if SCALED:
        z = tl.div_rn(x, divisor)
    if CUT:
        z = tl.where(w < threshold, NEGATIVE, z)
    return z


@triton.jit
def draft_row(
    column, wanted, q_row, q_vocab, places, is_point, KIND: tl.constexpr, REDUCED: tl.constexpr
):  # fmt: skip
    """The draft's logits at `column` where wanted, its places for them, and where it has any.

    Asked for beside the target's, before either is looked at: one trip to memory instead of two.
    """
    place = column
    y = tl.full(column.shape, NEGATIVE, tl.float32)
    if KIND == LOGITS or KIND == MIXED:
        if KIND == MIXED:
            wanted = wanted & (is_point == 0)
        if REDUCED:
            place = tl.load(places + column, mask=wanted, other=-1)
            wanted = wanted & (place >= 0)
        else:
            wanted = wanted & (column < q_vocab)
        y = tl.load(q_row + place, mask=wanted, other=NEGATIVE).to(tl.float32)
    return y, place, wanted


@triton.jit
def left_over(
    column, inside, x, w, divisor, log_mass, threshold, best,  # x logits of the target's row, w the same warped
    refused,  # whether q is to be taken away at all
    y, place, wanted,  # `draft_row`
    q_shift, q_divisor, q_log_mass, q_threshold, q_best,
    point, is_point, sparse_ids, sparse_probs, num_sparse, weight, alpha, beta,
    KIND: tl.constexpr, RULE: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Weights at `column` to draw the next token from: p, or after a refusal the positive part of weight * p - q."""
    z = warped(y, q_shift, q_divisor, SCALED)
    if RULE == SIGMOID:
        value = tl.zeros_like(w)
        if refused:
            q = score(sigmoid_logit(y, z, q_divisor, q_threshold, SCALED, CUT), alpha, beta)
            left = score(sigmoid_logit(x, w, divisor, threshold, SCALED, CUT), alpha, beta)
            value = tl.maximum(left - tl.where(wanted & (q == q), q, 0.0), 0.0)
        else:
            value = probability(w, column, log_mass, threshold, best, CUT, GREEDY)
    else:
        p = probability(w, column, log_mass, threshold, best, CUT, GREEDY)
        value = p
        if KIND != NO_DRAFT:
            q = tl.zeros_like(p)
            if KIND == LOGITS or KIND == MIXED:
                q = probability(z, place, q_log_mass, q_threshold, q_best, CUT, GREEDY)
                q = tl.where(wanted & (q == q), q, 0.0)
            if KIND == POINTS or KIND == MIXED:
                hit = (column == point).to(tl.float32)
                if KIND == MIXED:
                    q = tl.where(is_point != 0, hit, q)
                else:
                    q = hit
            if KIND == SPARSE:
                for s in range(num_sparse):
                    q += tl.where(column == tl.load(sparse_ids + s), tl.load(sparse_probs + s), 0.0)
                q = tl.maximum(q, 0.0)  # a law below 0 would add mass where the target has none
            if RULE == BLOCK_RULE:
                coarse = weight.to(tl.float32)  # float64 a token would take longer than reading it
                fine = (weight - coarse).to(tl.float32)
                left = coarse * p + (fine * p - q)
            else:
                left = p - q
            value = tl.where(refused, tl.maximum(left, 0.0), p)
    return tl.where(inside, value, 0.0)


@triton.jit
def target_logits(
    b, i, length, token, p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, positions
):  # fmt: skip
    """What is known of the target before its summaries are: rows, which tokens it has, their logits, temperature."""
    row = tl.load(p_index + b * p_index_stride + i, mask=i < positions, other=0)
    known = (i < length) & (token >= 0) & (token < p_vocab)
    x = tl.load(p_logits + row * p_stride + token, mask=known, other=NEGATIVE).to(tl.float32)
    return row, known, x, tl.load(p_temperature + b)


@triton.jit
def target_side(
    b, i, length, token, known, x, heat, peaks, masses, thresholds, bests, num_chunks, positions,
    CHUNKS: tl.constexpr, RULE: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, GREEDY: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """log p of the drafted tokens (for the sigmoid rule their scores' logits), and the summaries of all positions.

    Without summaries (SUMMED) the sigmoid rule needs one logit a token and nothing else.
    """
    if SUMMED:
        peak, shift, log_mass, threshold, best = merged_summary(
            b * positions + i, i <= length, heat, peaks, masses, thresholds, bests, num_chunks, CHUNKS, CUT, GREEDY
        )
    else:
        peak = tl.zeros_like(x)
        shift, log_mass, threshold, best = peak, peak, peak + NEGATIVE, tl.full(x.shape, -1, tl.int32)
    divisor, _ = divisor_of(heat)
    w = warped(x, shift, divisor, SCALED)
    if RULE == SIGMOID:
        log_p = sigmoid_logit(x, w, divisor, threshold, SCALED, CUT)
    else:
        log_p = log_probability(w, token, log_mass, threshold, best, CUT, GREEDY)
    return tl.where(known, log_p, NEGATIVE), peak, shift, divisor, log_mass, threshold, best


@triton.jit
def draft_side(
    b, i, length, token, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
    points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
    peaks, masses, thresholds, bests, num_chunks, q_start, positions,
    CHUNKS: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr,
    SCALED: tl.constexpr, CUT: tl.constexpr, GREEDY: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """log q of the drafted tokens (or their scores' logits), the summaries, and where points lie."""
    drafted = i < length
    row = tl.zeros_like(token)
    log_q = tl.full(token.shape, NEGATIVE, tl.float32)
    shift = tl.zeros_like(log_q)
    log_mass, threshold, divisor = shift, log_q, tl.full((), 1.0, tl.float32)
    best = tl.full(token.shape, -1, tl.int32)
    point = tl.full(token.shape, -1, tl.int64)
    pointed = tl.full((), 0, tl.int32)
    if KIND == LOGITS or KIND == MIXED:
        row = tl.load(q_index + b * q_index_stride + i, mask=i < positions, other=0)
        heat = tl.load(q_temperature + b)
        divisor, plain = divisor_of(heat)
        if KEPT:
            place = kept + row * KEPT_WIDTH
            shift = tl.where(plain, 0.0, tl.load(place, mask=drafted, other=0.0))
            log_mass = tl.load(place + 1, mask=drafted, other=0.0)
            threshold = tl.load(place + 2, mask=drafted, other=NEGATIVE)
            best = tl.load(place + 3, mask=drafted, other=-1.0).to(tl.int32)
            log_q = tl.load(place + 4, mask=drafted, other=NEGATIVE)
        elif SUMMED:
            _, shift, log_mass, threshold, best = merged_summary(
                q_start + b * positions + i, drafted, heat, peaks, masses, thresholds, bests, num_chunks, CHUNKS, CUT,
                GREEDY,
            )  # fmt: skip
        if not KEPT or RULE == SIGMOID:
            if REDUCED:
                where = tl.load(places + token, mask=drafted & (token >= 0), other=-1).to(tl.int64)
            else:
                where = token
            known = drafted & (where >= 0) & (where < q_vocab)
            y = tl.load(q_logits + row * q_stride + where, mask=known, other=NEGATIVE).to(tl.float32)
            z = warped(y, shift, divisor, SCALED)
            if RULE == SIGMOID:
                log_q = sigmoid_logit(y, z, divisor, threshold, SCALED, CUT)
            else:
                log_q = log_probability(z, where, log_mass, threshold, best, CUT, GREEDY)
            log_q = tl.where(known, log_q, NEGATIVE)
    if KIND == POINTS or KIND == MIXED:
        point = tl.load(points + b * points_stride + i, mask=drafted, other=-1)
        hit = tl.where(point == token, 0.0, NEGATIVE)
        if KIND == MIXED:
            pointed = tl.load(is_point + b).to(tl.int32)
            log_q = tl.where(pointed != 0, hit, log_q)
        else:
            log_q = hit
    if KIND == SPARSE:
        q = tl.zeros_like(shift)
        for s in range(num_sparse):
            entry = (b * sparse_positions + i) * num_sparse + s
            same = tl.load(sparse_ids + entry, mask=drafted, other=-1) == token
            q += tl.where(same, tl.load(sparse_probs + entry, mask=drafted, other=0.0), 0.0)
        log_q = tl.log(q)
    return row, log_q, shift, divisor, log_mass, threshold, best, point, pointed


@triton.jit
def acceptance(i, seed, request_id, round_, RULE: tl.constexpr):
    """What a token's odds are compared with: a uniform for the sigmoid rule, else its logarithm."""
    u = uniform(seed, request_id, round_, i.to(tl.int64), ACCEPT)
    if RULE != SIGMOID:
        u = tl.log(u)
    return u


@triton.jit
def count_kept(i, length, log_p, log_q, u, alpha, beta, RULE: tl.constexpr):
    """How many tokens are kept: those before the first that is not, and every comparison is strict."""
    if RULE == SIGMOID:
        kept = u * score(log_q, alpha, beta) < score(log_p, alpha, beta)
    else:
        kept = (log_q > NEGATIVE) & (u + log_q < log_p)
    return tl.min(tl.where(kept & (i < length), NOBODY, i), axis=0)


@triton.jit
def block_weights(i, length, log_p, log_q, KP: tl.constexpr):
    """w_j before every position j: how much of the prefix the target still wants (`math.verify.block_weights`)."""
    p, q = tl.exp(log_p).to(tl.float64), tl.exp(log_q).to(tl.float64)
    ratio = tl.where((p > 0) & (q > 0), p / q, 0.0)
    weights = tl.full(ratio.shape, 1.0, tl.float64)
    weight = tl.full((), 1.0, tl.float64)
    for j in tl.static_range(KP - 1):
        weight = tl.minimum(weight * at(ratio, i, j), 1.0)
        weights = tl.where(i == j + 1, weight, weights)
    return weights


@triton.jit
def block_count(i, length, weights, excess, seed, request_id, round_):
    """The longest prefix that its own test keeps; `excess` is what is left at every position."""
    u = uniform(seed, request_id, round_, (i - 1).to(tl.int64), ACCEPT)
    inside = tl.where(excess > 0, excess / (excess + 1 - weights), 0.0)
    chance = tl.where(i == length, weights, inside)
    passed = (i >= 1) & (i <= length) & (u < chance)
    return tl.max(tl.where(passed, i, 0), axis=0)
