"""Between which two levels the threshold of a row very likely lies: an estimate. Device code; `summary` launches it.

What a sample of the row holds below a level, scaled up, estimates the row's mass there. The sample is read, and weighed
at eight levels, while the pass over the logits still runs: relative to its own largest entry, because the row's is not
known yet. Whether the threshold does lie there is checked later.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import COUNTS, NEGATIVE, NONE, counted, divisor_of, exponential, merged
from forerun.kernels.truncate.chunks import cuts_of, row_start, side_of
from forerun.kernels.truncate.levels import reached, spaced
from forerun.kernels.truncate.select import floor_of

DONE = tl.constexpr(float("inf"))  # both levels of a row in which nothing is looked for
BESIDE = tl.constexpr(0.01)  # the bracket reaches at least so far below the largest entry
SURE = tl.constexpr(3.0)  # standard deviations of an estimate, at least
APART = tl.constexpr(32)  # between rows' counters, or programs of different rows would wait for each other


@triton.jit(do_not_specialize=(*COUNTS, "p_rows"))
def estimate_kernel(
    lengths,
    p, q,  # LogitRows
    p_cuts, q_cuts,  # Truncation
    chunks,  # Summaries of chunks
    brackets,  # [R, 2] float32
    arrived,  # [R, APART] int32, set to 0 for `collect_kernel`
    out,  # Summaries of rows; the mass is the whole row's
    p_positions, p_index, q_positions, q_index, p_rows, num_chunks, extra,
    CHUNKS: tl.constexpr, SAMPLE: tl.constexpr, THREADS: tl.constexpr, ROUNDS: tl.constexpr,
    HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks, and estimate two levels between which its threshold lies."""
    r = tl.program_id(0)
    if PDL:  # at once: those that follow read their logits meanwhile
        cuda.gdc_launch_dependents()
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    side, b, i, extra = side_of(r, p_rows, extra, p, q, HAS_DRAFT)
    cuts = cuts_of(r, b, p_rows, p_cuts, q_cuts, HAS_DRAFT)
    length, heat = tl.load(lengths + b), tl.load(side.temperature + b)
    used = i < length + extra
    row = row_start(side, b, i)
    divisor, plain = divisor_of(heat)
    counts, holds = (cuts.top_k > 0) & (cuts.top_k < side.vocab), cuts.top_p < 1.0
    below, top, factor = _sampled(row, side.vocab, used, divisor, SAMPLE, THREADS, SCALED)
    weights = tl.where(below < float("inf"), tl.where(counts, 1.0, exponential(-below)), 0.0)
    first, depths = _depths()
    each = 1.0 / side.vocab  # a product later is shorter than a division
    sums, all_of_it = reached(below, weights, first), tl.sum(tl.sum(tl.sum(weights, axis=2), axis=0), axis=0)
    if PDL:
        cuda.gdc_wait()
    low, high = tl.full((), DONE, tl.float32), tl.full((), DONE, tl.float32)
    if used:
        chunk = tl.arange(0, CHUNKS)
        chunk_peak = tl.load(chunks.peak + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(chunks.mass + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        peak, mass = merged(chunk_peak, chunk_mass, divisor if SCALED else 1.0, 0)
        if GREEDY:
            ids = tl.load(chunks.best + r * num_chunks + chunk, mask=chunk < num_chunks, other=NONE)
            tl.store(out.best + r, tl.min(tl.where(chunk_peak == peak, ids, NONE), axis=0))
        tl.store(out.peak + r, peak)
        tl.store(out.mass + r, mass)
        tl.store(out.threshold + r, NEGATIVE)
        base = tl.where(plain, peak, 0.0)
        floor = floor_of(cuts.min_p, base)
        if (heat > 0) & (peak - peak == 0) & (counts | holds | (floor > NEGATIVE)):
            low, high = floor, floor
            if counts | holds:
                goal = peak  # divided, but not yet relative to the peak: as the sample is
                if SCALED:
                    goal = peak / divisor
                left = ((1.0 - cuts.top_p) * mass).to(tl.float32) * exponential(goal - top)  # in the sample's own unit
                near, deep = top - goal - 1.0, top - goal + 104.0  # how far below the sample's top the bracket lies
                near, deep = _narrowed(near, deep, depths, sums, factor, left, counts, cuts.top_k, all_of_it, each)
                for _ in range(ROUNDS):
                    levels, depths = spaced(near, deep)
                    sums = reached(below, weights, levels)
                    near, deep = _narrowed(near, deep, depths, sums, factor, left, counts, cuts.top_k, all_of_it, each)
                seen = all_of_it > 0  # or the whole row is looked through: only few entries of it can be there
                # A sample without the likely tokens finds too little everywhere; the largest is kept all the same.
                low = tl.where(seen, tl.minimum(top - deep - goal + base, base - BESIDE), base - 104.0)
                high = tl.where(seen & (counts == 0), top - near - goal + base, base + 1.0)
                if not counts:
                    low, high = tl.where(floor >= high, floor, low), tl.maximum(high, floor)
    tl.store(arrived + r * APART, 0)
    tl.store(brackets + 2 * r, low)
    tl.store(brackets + 2 * r + 1, high)


@triton.jit
def _sampled(
    row, vocab, used, divisor, SAMPLE: tl.constexpr, THREADS: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Of entries of the row, eight neighbours at a time, how far each lies below the largest, [N, THREADS, 1]; that
    one; and how many of the row each stands for."""
    j = tl.arange(0, SAMPLE)
    column = j // 8 * tl.maximum(vocab // (SAMPLE // 8), 8) + j % 8
    values = tl.load(row + column, mask=(column < vocab) & used, other=NEGATIVE).to(tl.float32)
    if SCALED:
        values = values / divisor
    top = tl.max(values, axis=0)
    top = tl.where(top == NEGATIVE, 0.0, top)
    return tl.reshape(top - values, [SAMPLE // THREADS, THREADS, 1]), top, tl.maximum(vocab / SAMPLE, 1.0)


@triton.jit
def _depths():
    """Where to look first, below the largest entry of the sample; no entry is likely to lie on one of these."""
    j = tl.arange(0, 8)
    near = tl.where(j < 2, tl.where(j == 0, 0.01, 0.6), tl.where(j == 2, 1.5, 2.5))
    far = tl.where(j < 6, tl.where(j == 4, 3.5, 5.0), tl.where(j == 6, 8.0, 20.0))
    return (0.01, 0.6, 1.5, 2.5, 3.5, 5.0, 8.0, 20.0), tl.where(j < 4, near, far)


@triton.jit
def _narrowed(near, deep, depths, sums, factor, left, counts, k, all_of_it, each):
    """The bracket after a look at eight levels: whether there is surely less mass than `left` below, or surely more;
    or surely, or surely not, k entries above. No entry below a level weighs more than one at it, which bounds the
    mean of squares, and so the variance of the estimate."""
    estimate = factor * tl.where(counts, all_of_it - sums, sums)
    most = tl.where(counts, 1.0, exponential(-depths))
    spread = SURE * tl.sqrt(factor * estimate * tl.maximum(most - estimate * each, 0.0))
    reaches = tl.where(counts, estimate - spread >= k, estimate + spread <= left)
    misses = tl.where(counts, estimate + spread < k, estimate - spread >= left)
    deep = tl.minimum(deep, tl.min(tl.where(reaches, depths, float("inf")), axis=0))
    return tl.maximum(near, tl.max(tl.where(misses, depths, NEGATIVE), axis=0)), deep
