"""Acceptance of one row inside a kernel: the draft tokens' chances under both laws, and what is left of a law after q.

Everything about the K + 1 positions of a row is a vector of that length, so no program loops over positions or waits
for one load after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from forerun.kernels.law import (
    NEGATIVE,
    NONE,
    RowLaw,
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


class DraftAt(NamedTuple):
    """The draft's law at the one position that the next token is drawn from."""

    law: Any  # RowLaw
    point: Any  # the token of a point mass
    is_point: Any
    sparse_ids: Any  # where its [S] entries begin
    sparse_probs: Any
    num_sparse: Any


@triton.jit
def merged_summary(r, valid, temperature, summaries, num_chunks, CASE: tl.constexpr):
    """Peak, shift, log mass, threshold and most likely id of the rows `r` of the summaries, a vector each."""
    chunk = tl.arange(0, CASE.CHUNKS)
    place = r[:, None] * num_chunks + chunk[None, :]
    there = valid[:, None] & (chunk < num_chunks)[None, :]
    chunk_peak = tl.load(summaries.peak + place, mask=there, other=NEGATIVE)
    divisor, plain = divisor_of(temperature)
    peak, mass = merged(chunk_peak, tl.load(summaries.mass + place, mask=there, other=0.0), divisor, 1)
    shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
    log_mass = log_mass_of(base, mass)
    threshold = tl.full(log_mass.shape, NEGATIVE, tl.float32)
    if CASE.CUT:
        threshold = tl.load(summaries.threshold + r, mask=valid, other=NEGATIVE)
    best = tl.full(log_mass.shape, -1, tl.int32)
    if CASE.GREEDY:
        ids = tl.load(summaries.best + place, mask=there, other=NONE)
        lowest = tl.min(tl.where(chunk_peak == peak[:, None], ids, NONE), axis=1)
        best = tl.where(temperature == 0.0, lowest, -1)
    return peak, shift, log_mass, threshold, best


@triton.jit
def score(z, bounds):
    """The sigmoid of Wagner et al. instead of a probability: 0 below alpha, 1 above beta (`math.sigmoid`)."""
    alpha, beta = bounds
    inside = inverse(1.0 + exponential((alpha - z) * (1.0 / (beta - alpha))))  # one division a kernel, not one a token
    return tl.where(z < alpha, 0.0, tl.where(z > beta, 1.0, inside))


@triton.jit
def at(vector, i, place):
    """The entry of `vector` at `place`."""
    return tl.sum(tl.where(i == place, vector, tl.zeros_like(vector)), axis=0)


@triton.jit
def law_at(law, rows, i, n):
    """The law at position `n`; its row becomes the address at which its logits begin."""
    start = rows.logits + at(law.row, i, n) * rows.stride
    log_mass, threshold = at(law.log_mass, i, n), at(law.threshold, i, n)
    return RowLaw(start, at(law.shift, i, n), law.divisor, log_mass, threshold, at(law.best, i, n))


@triton.jit
def draft_at(law, rows, draft, point, is_point, b, i, n):
    """The draft's law at position `n` of batch row `b`; behind a draft, where none is asked for, its last one."""
    sparse = (b * draft.sparse_positions + tl.minimum(n, draft.sparse_positions - 1)) * draft.num_sparse
    ids, probs = draft.sparse_ids + sparse, draft.sparse_probs + sparse
    return DraftAt(law_at(law, rows, i, n), at(point, i, n), is_point, ids, probs, draft.num_sparse)


@triton.jit
def sigmoid_logit(x, w, law, CASE: tl.constexpr):
    """What the sigmoid rule scores: the logit over the temperature, not shifted; -inf where the law cuts."""
    z = x
    if CASE.SCALED:
        z = tl.div_rn(x, law.divisor)
    if CASE.CUT:
        z = tl.where(w < law.threshold, NEGATIVE, z)
    return z


@triton.jit
def draft_row(column, wanted, q, vocab, places, CASE: tl.constexpr):
    """The draft's logits at `column` where wanted, its places for them, and where it has any.

    Asked for beside the target's, before either is looked at: one trip to memory instead of two.
    """
    place = column
    y = tl.full(column.shape, NEGATIVE, tl.float32)
    if CASE.KIND == LOGITS or CASE.KIND == MIXED:
        if CASE.KIND == MIXED:
            wanted = wanted & (q.is_point == 0)
        if CASE.REDUCED:
            place = tl.load(places + column, mask=wanted, other=-1)
            wanted = wanted & (place >= 0)
        else:
            wanted = wanted & (column < vocab)
        y = tl.load(q.law.row + place, mask=wanted, other=NEGATIVE).to(tl.float32)
    return y, place, wanted


@triton.jit
def left_over(
    column, inside,
    x, w, p,  # logits of the target's row, the same warped, and its RowLaw
    refused,  # whether q is to be taken away at all
    y, place, wanted,  # `draft_row`
    q,  # DraftAt
    weight, bounds, CASE: tl.constexpr,
):  # fmt: skip
    """Weights at `column` to draw the next token from: p, or after a refusal the positive part of weight * p - q."""
    z = warped(y, q.law.shift, q.law.divisor, CASE.SCALED)
    if CASE.RULE == SIGMOID:
        value = tl.zeros_like(w)
        if refused:
            q_score = score(sigmoid_logit(y, z, q.law, CASE), bounds)
            p_score = score(sigmoid_logit(x, w, p, CASE), bounds)
            value = tl.maximum(p_score - tl.where(wanted & (q_score == q_score), q_score, 0.0), 0.0)
            is_number = (x - x == 0) | (x == float("-inf"))
            value = tl.where(is_number, value, float("nan"))  # a maximum would hide it from the sum
        else:
            value = probability(w, column, p, CASE.CUT, CASE.GREEDY)
    else:
        p_prob = probability(w, column, p, CASE.CUT, CASE.GREEDY)
        value = p_prob
        if CASE.KIND != NO_DRAFT:
            q_prob = tl.zeros_like(p_prob)
            if CASE.KIND == LOGITS or CASE.KIND == MIXED:
                q_prob = probability(z, place, q.law, CASE.CUT, CASE.GREEDY)
                q_prob = tl.where(wanted & (q_prob == q_prob), q_prob, 0.0)
            if CASE.KIND == POINTS or CASE.KIND == MIXED:
                hit = (column == q.point).to(tl.float32)
                if CASE.KIND == MIXED:
                    q_prob = tl.where(q.is_point != 0, hit, q_prob)
                else:
                    q_prob = hit
            if CASE.KIND == SPARSE:
                for s in range(q.num_sparse):
                    q_prob += tl.where(column == tl.load(q.sparse_ids + s), tl.load(q.sparse_probs + s), 0.0)
                q_prob = tl.maximum(q_prob, 0.0)  # a law below 0 would add mass where the target has none
            if CASE.RULE == BLOCK_RULE:
                coarse = weight.to(tl.float32)  # float64 a token would take longer than reading it
                fine = (weight - coarse).to(tl.float32)
                left = coarse * p_prob + (fine * p_prob - q_prob)
            else:
                left = p_prob - q_prob
            value = tl.where(refused, tl.maximum(left, 0.0), p_prob)
    return tl.where(inside, value, 0.0)


@triton.jit
def target_logits(b, i, length, token, rows):
    """What is known of the target before its summaries are: rows, which tokens it has, their logits, temperature."""
    row = tl.load(rows.index + b * rows.index_stride + i, mask=i < rows.positions, other=0)
    known = (i < length) & (token >= 0) & (token < rows.vocab)
    x = tl.load(rows.logits + row * rows.stride + token, mask=known, other=NEGATIVE).to(tl.float32)
    return row, known, x, tl.load(rows.temperature + b)


@triton.jit
def target_side(b, i, length, token, row, known, x, heat, summaries, num_chunks, positions, CASE: tl.constexpr):
    """The target's law at all positions, log p of the drafted tokens (for the sigmoid rule their scores' logits), and
    the peaks.

    Without summaries (SUMMED) the sigmoid rule needs one logit a token and nothing else.
    """
    if CASE.SUMMED:
        peak, shift, log_mass, threshold, best = merged_summary(
            b * positions + i, i <= length, heat, summaries, num_chunks, CASE
        )
    else:
        peak = tl.zeros_like(x)
        shift, log_mass, threshold, best = peak, peak, peak + NEGATIVE, tl.full(x.shape, -1, tl.int32)
    divisor, _ = divisor_of(heat)
    law = RowLaw(row, shift, divisor, log_mass, threshold, best)
    w = warped(x, shift, divisor, CASE.SCALED)
    if CASE.RULE == SIGMOID:
        log_p = sigmoid_logit(x, w, law, CASE)
    else:
        log_p = log_probability(w, token, law, CASE.CUT, CASE.GREEDY)
    return law, tl.where(known, log_p, NEGATIVE), peak


@triton.jit
def draft_side(b, i, length, token, rows, draft, summaries, num_chunks, first, CASE: tl.constexpr):
    """The draft's law at all positions, log q of the drafted tokens (or their scores' logits), and where points lie.

    `first` is the row at which the draft's summaries begin.
    """
    drafted = i < length
    row = tl.zeros_like(token)
    log_q = tl.full(token.shape, NEGATIVE, tl.float32)
    shift = tl.zeros_like(log_q)
    log_mass, threshold, divisor = shift, log_q, tl.full((), 1.0, tl.float32)
    best = tl.full(token.shape, -1, tl.int32)
    point = tl.full(token.shape, -1, tl.int64)
    is_point = tl.full((), 0, tl.int32)
    if CASE.KIND == LOGITS or CASE.KIND == MIXED:
        row = tl.load(rows.index + b * rows.index_stride + i, mask=i < rows.positions, other=0)
        heat = tl.load(rows.temperature + b)
        divisor, plain = divisor_of(heat)
        if CASE.KEPT:
            place = draft.kept + row * KEPT_WIDTH
            shift = tl.where(plain, 0.0, tl.load(place, mask=drafted, other=0.0))
            log_mass = tl.load(place + 1, mask=drafted, other=0.0)
            threshold = tl.load(place + 2, mask=drafted, other=NEGATIVE)
            best = tl.load(place + 3, mask=drafted, other=-1.0).to(tl.int32)
            log_q = tl.load(place + 4, mask=drafted, other=NEGATIVE)
        elif CASE.SUMMED:
            _, shift, log_mass, threshold, best = merged_summary(
                first + b * rows.positions + i, drafted, heat, summaries, num_chunks, CASE
            )
    law = RowLaw(row, shift, divisor, log_mass, threshold, best)
    if CASE.KIND == LOGITS or CASE.KIND == MIXED:
        if not CASE.KEPT or CASE.RULE == SIGMOID:
            if CASE.REDUCED:
                where = tl.load(draft.places + token, mask=drafted & (token >= 0), other=-1).to(tl.int64)
            else:
                where = token
            known = drafted & (where >= 0) & (where < rows.vocab)
            y = tl.load(rows.logits + row * rows.stride + where, mask=known, other=NEGATIVE).to(tl.float32)
            z = warped(y, shift, divisor, CASE.SCALED)
            if CASE.RULE == SIGMOID:
                log_q = sigmoid_logit(y, z, law, CASE)
            else:
                log_q = log_probability(z, where, law, CASE.CUT, CASE.GREEDY)
            log_q = tl.where(known, log_q, NEGATIVE)
    if CASE.KIND == POINTS or CASE.KIND == MIXED:
        point = tl.load(draft.points + b * draft.points_stride + i, mask=drafted, other=-1)
        hit = tl.where(point == token, 0.0, NEGATIVE)
        if CASE.KIND == MIXED:
            is_point = tl.load(draft.is_point + b).to(tl.int32)
            log_q = tl.where(is_point != 0, hit, log_q)
        else:
            log_q = hit
    if CASE.KIND == SPARSE:
        q = tl.zeros_like(shift)
        for s in range(draft.num_sparse):
            entry = (b * draft.sparse_positions + i) * draft.num_sparse + s
            same = tl.load(draft.sparse_ids + entry, mask=drafted, other=-1) == token
            q += tl.where(same, tl.load(draft.sparse_probs + entry, mask=drafted, other=0.0), 0.0)
        log_q = tl.log(q)
    return law, log_q, point, is_point


@triton.jit
def acceptance(i, seed, request_id, round_, RULE: tl.constexpr):
    """What a token's odds are compared with: a uniform for the sigmoid rule, else its logarithm."""
    u = uniform(seed, request_id, round_, i.to(tl.int64), ACCEPT)
    if RULE != SIGMOID:
        u = tl.log(u)
    return u


@triton.jit
def count_kept(i, length, log_p, log_q, u, bounds, RULE: tl.constexpr):
    """How many tokens are kept: those before the first that is not, and every comparison is strict."""
    if RULE == SIGMOID:
        kept = u * score(log_q, bounds) < score(log_p, bounds)
    else:
        kept = (log_q > NEGATIVE) & (u + log_q < log_p)
    return tl.min(tl.where(kept & (i < length), NONE, i), axis=0)


@triton.jit
def count_usable(i, length, peak):
    """Positions of a row before the first whose logits are no law (`math.verify`): there a draft ends."""
    return tl.min(tl.where((i <= length) & (peak - peak != 0), i, NONE), axis=0)


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
