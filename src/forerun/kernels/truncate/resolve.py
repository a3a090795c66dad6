"""The threshold where a row may keep any number of tokens, last step: one program a row. Device code.

`collect_kernel` left a list of the entries between two levels, and the mass above them. If they are few, each is
compared with each. Of more, comparing with eight levels at a time narrows down where in the list the threshold lies;
from there the search goes value by value, in float64. If it does not lie in the list, or the list is full, the row is
searched in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import COMPILED, COUNTS, NEGATIVE, counted, divisor_of
from forerun.kernels.truncate.chunks import cuts_of, row_start, side_of
from forerun.kernels.truncate.estimate import APART, DONE
from forerun.kernels.truncate.levels import around, reached
from forerun.kernels.truncate.search import cut_in_memory
from forerun.kernels.truncate.select import cut_few, held, limits_of

ROUNDING = tl.constexpr(2e-6)  # more than a float32 sum of weights can be off, relatively
TURNS = tl.constexpr(3)  # of eight levels each: thousands of values become one or two
MOST_TURNS = tl.constexpr(6)  # where values do not lie evenly
MANY = tl.constexpr(8.0)  # values left


@triton.jit(do_not_specialize=(*COUNTS, "p_rows"))
def resolve_kernel(
    p, q,  # LogitRows
    p_cuts, q_cuts,  # Truncation
    brackets, arrived, above, listed,
    out,  # Summaries of rows; the mass is the whole row's, and what is kept after this
    p_positions, p_index, q_positions, q_index, p_rows, num_chunks,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, FEWEST: tl.constexpr,
    SCAN: tl.constexpr, THREADS: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; nothing to do where the row is done."""
    r = tl.program_id(0)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    side, b, i, _ = side_of(r, p_rows, 0, p, q, HAS_DRAFT)
    cuts = cuts_of(r, b, p_rows, p_cuts, q_cuts, HAS_DRAFT)
    row, heat = row_start(side, b, i), tl.load(side.temperature + b)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
    peak, mass, within = tl.load(out.peak + r), tl.load(out.mass + r), tl.load(arrived + r * APART)
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, FEW)
    overs = tl.load(above + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    few = tl.load(listed + r * SIZE + place)  # what is not there is cut off later: the number is still on its way
    if low < DONE:
        divisor, plain = divisor_of(heat)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        limits = limits_of(cuts, base, side.vocab)
        need, over = tl.where(limits.holds, held(limits.p, base, mass), float("inf")), tl.sum(overs, axis=0)
        # the threshold is min-p's, above the list, if `lies`
        threshold, kept, lies = limits.floor, over, (limits.counts == 0) & (limits.floor >= high)
        fits = (within <= MOST) & tl.where(limits.counts, within >= limits.k, over < need)
        if fits & (lies == 0):
            if within <= FEWEST:  # of a peaked row, whose values lie far apart: levels between them help little
                row_list = listed + r * SIZE
                threshold, kept = cut_few(row_list, within, base, mass, over, limits, FEWEST, FEWEST // 4)
                lies = threshold > NEGATIVE
            elif within <= FEW:
                w = tl.where(place < within, few, NEGATIVE)
                threshold, kept, lies = _cut(w, base, limits, need, low, high, over, THREADS)
            else:
                every = tl.arange(0, SIZE)
                many = tl.load(listed + r * SIZE + every, mask=every < within, other=NEGATIVE)
                threshold, kept, lies = _cut(many, base, limits, need, low, high, over, THREADS)
        if (fits & lies) == 0:
            threshold, kept = cut_in_memory(row, side.vocab, shift, divisor, base, mass, limits, SCAN, SCALED)
        tl.store(out.mass + r, kept)
        tl.store(out.threshold + r, threshold)


@triton.jit
def _cut(w, base, limits, need, low, high, over, THREADS: tl.constexpr):
    """Threshold, kept mass, and whether it lies there at all: `w` are all values from `low` to `high`, and above that
    there is a mass `over`, of `need` in all (unless top-k comes first, before which it is not known)."""
    weights = tl.where(w > NEGATIVE, tl.exp(w - base), 0.0)
    total = tl.sum(weights, axis=0)
    lies = limits.counts | (over + total * 0.99999 >= need)  # a little less than there is, however rounded
    threshold, mass = low, over
    if lies:
        if limits.counts:
            ones = tl.where(w > NEGATIVE, 1.0, 0.0)
            number = limits.k.to(tl.float64)
            all_ones = tl.sum(ones, axis=0)
            top = _just_short(w, ones, number.to(tl.float32), all_ones, low, high, base, True, THREADS)
            threshold, _ = _last_kept(w, ones, number, top)
            weights = tl.where(w >= threshold, weights, 0.0)
            mass = tl.sum(weights.to(tl.float64), axis=0)
            total, need = mass.to(tl.float32), held(limits.p, base, mass)
        if limits.holds:
            rest = need - over
            top = _just_short(w, weights, rest.to(tl.float32), total, threshold, high, base, False, THREADS)
            threshold, mass = _last_kept(w, weights, rest, top)
            mass += over
        if limits.floor > threshold:
            threshold = limits.floor
            mass = over + tl.sum(tl.where(w >= limits.floor, weights, 0.0).to(tl.float64), axis=0)
    return threshold, mass, lies


@triton.jit
def _just_short(values, weights, need, total, low, high, base, ONES: tl.constexpr, THREADS: tl.constexpr):
    """A level little above the answer: the weight from there on is certainly less than `need`, as it is from `high`
    on; from `low` on it is `total`. A float32 sum of at most `need` is off by a little of it.

    In between weight grows evenly, more or less, so that the answer is likely to lie where a line reaches `need`.
    """
    N: tl.constexpr = max(values.shape[0] // (4 * THREADS), 1)
    M: tl.constexpr = values.shape[0] // (N * THREADS)
    values, weights = tl.reshape(values, [N, THREADS, M]), tl.reshape(weights, [N, THREADS, M])
    from_low, from_high, turn, one = total, tl.zeros_like(total), 0, tl.zeros_like(total)
    while (turn < TURNS) | ((turn < MOST_TURNS) & (from_low - from_high > MANY * one)):
        share = tl.minimum(tl.maximum((need - from_high) / (from_low - from_high), 0.0), 1.0)
        numbers, levels = around(low, high - share * (high - low), high)
        sums = reached(values, weights, numbers)
        enough, short = sums >= need * (1 + ROUNDING), sums < need * (1 - ROUNDING)
        low = tl.maximum(low, tl.max(tl.where(enough, levels, NEGATIVE), axis=0))
        high = tl.minimum(high, tl.min(tl.where(short, levels, float("inf")), axis=0))
        from_low = tl.minimum(from_low, tl.min(tl.where(enough, sums, float("inf")), axis=0))
        from_high = tl.maximum(from_high, tl.max(tl.where(short, sums, 0.0), axis=0))
        turn, one = turn + 1, tl.where(ONES, 1.0, tl.exp(low - base))
    return high


@triton.jit
def _last_kept(values, weights, need, high):
    """The answer and the weight from it on, in float64: from `high` downwards, value by value."""
    mass = tl.sum(tl.where(values >= high, weights, 0.0).to(tl.float64), axis=0)
    value = high
    while (mass < need) & (value > NEGATIVE):
        value, weight = _next(values, weights, value)
        mass += weight
    return value, mass


@triton.jit
def _larger(value, weight, number, other, others_weight, others_number):
    """The larger of two values, what one of it weighs, and how many there are of it."""
    first, second = value >= other, other >= value
    number = tl.where(first, number, 0) + tl.where(second, others_number, 0)
    return tl.maximum(value, other), tl.where(first, weight, others_weight), number


@triton.jit
def _next(values, weights, value):
    """The largest value below `value`, and what all of it weighs."""
    below, one = tl.where(values < value, values, NEGATIVE), tl.full(values.shape, 1, tl.int32)
    if COMPILED:
        largest, weight, number = tl.reduce((below, weights, one), 0, _larger)
    else:
        largest = tl.max(below, axis=0)
        weight = tl.max(tl.where(below == largest, weights, 0.0), axis=0)
        number = tl.sum(tl.where(below == largest, one, 0), axis=0)
    return largest, weight.to(tl.float64) * number
