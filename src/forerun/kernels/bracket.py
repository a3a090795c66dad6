"""Between which two levels the threshold of a row very likely lies: an estimate. Device code; `summary` launches it.

What a sample of the row holds below a level, scaled up, estimates the row's mass there. The sample is read, and weighed
at sixteen levels, while the pass over the logits still runs: relative to its own largest entry, because the row's is
not known yet. Whether the threshold does lie there is checked later.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.chunks import NOT_FOUND, cuts_of, side_of
from forerun.kernels.law import NEGATIVE, divisor_of, exponential, merged
from forerun.kernels.levels import closer, reached, spaced
from forerun.kernels.select import floor_of

DONE = tl.constexpr(float("inf"))  # both levels of a row in which nothing is looked for
SURE = tl.constexpr(3.0)  # standard deviations of an estimate, at least
FINER = tl.constexpr(2)  # rounds after the pass, each nine times as fine as the one before
APART = tl.constexpr(32)  # between rows' counters, or programs of different rows would wait for each other


@triton.jit
def bracket_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    peaks, masses, bests,
    brackets,  # [R, 2] float32
    arrived,  # [R, APART] int32, set to 0 for `wide_kernel`
    peak_out, mass_out, threshold_out, best_out,  # [R]
    p_rows, num_chunks, extra,
    CHUNKS: tl.constexpr, SAMPLE: tl.constexpr, THREADS: tl.constexpr, HAS_DRAFT: tl.constexpr,
    SCALED: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks, and say where its threshold will be looked for."""
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    k, p, least = cuts_of(r, b, p_rows, p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p, HAS_DRAFT)
    length, heat = tl.load(lengths + b), tl.load(temperature + b)
    used = i < length + extra
    row = logits + tl.load(index + b * index_stride + i) * stride
    divisor, plain = divisor_of(heat)
    counts, holds = (k > 0) & (k < vocab), p < 1.0
    values, factor = _sampled(row, vocab, used, divisor, SAMPLE, SCALED)
    top = tl.max(values, axis=0)
    weights = tl.where(values > NEGATIVE, tl.where(counts, 1.0, exponential(values - top)), 0.0)
    number = tl.sum(weights, axis=0)
    values = tl.reshape(values, [SAMPLE // THREADS, THREADS, 1])
    weights = tl.reshape(weights, [SAMPLE // THREADS, THREADS, 1])
    near, far = _levels(top)
    near_sums, far_sums = _below(values, weights, near), _below(values, weights, far)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    low, high = tl.full((), DONE, tl.float32), tl.full((), DONE, tl.float32)
    if used:
        chunk = tl.arange(0, CHUNKS)
        chunk_peak = tl.load(peaks + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(masses + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        peak, mass = merged(chunk_peak, chunk_mass, divisor if SCALED else 1.0, 0)
        if GREEDY:
            ids = tl.load(bests + r * num_chunks + chunk, mask=chunk < num_chunks, other=NOT_FOUND)
            tl.store(best_out + r, tl.min(tl.where(chunk_peak == peak, ids, NOT_FOUND), axis=0))
        tl.store(peak_out + r, peak)
        tl.store(mass_out + r, mass)
        tl.store(threshold_out + r, NEGATIVE)
        base = tl.where(plain, peak, 0.0)
        floor = floor_of(least, base)
        if (heat > 0) & (peak - peak == 0) & (counts | holds | (floor > NEGATIVE)):
            low, high = floor, floor
            if counts | holds:
                goal = peak  # divided, but not yet relative to the peak: as the sample is
                if SCALED:
                    goal = peak / divisor
                left = ((1.0 - p) * mass).to(tl.float32) * exponential(goal - top)  # in the sample's own unit
                low, high = goal - 104.0, goal + 1.0
                low, high = _narrowed(low, high, near, near_sums, top, factor, left, counts, k, number)
                low, high = _narrowed(low, high, far, far_sums, top, factor, left, counts, k, number)
                for _ in range(FINER):
                    finer = spaced(low, high)
                    sums = _below(values, weights, finer)
                    low, high = _narrowed(low, high, finer, sums, top, factor, left, counts, k, number)
                low, high = low - goal + base, tl.where(counts, goal + 1.0, high) - goal + base
                if not counts:
                    low, high = tl.where(floor >= high, floor, low), tl.maximum(high, floor)
    tl.store(arrived + r * APART, 0)
    tl.store(brackets + 2 * r, low)
    tl.store(brackets + 2 * r + 1, high)


@triton.jit
def _sampled(row, vocab, used, divisor, SAMPLE: tl.constexpr, SCALED: tl.constexpr):
    """Entries of the row, eight neighbours at a time, and how many of the row each of them stands for."""
    j = tl.arange(0, SAMPLE)
    column = j // 8 * tl.maximum(vocab // (SAMPLE // 8), 8) + j % 8
    inside = column < vocab
    values = tl.load(row + column, mask=inside & used, other=NEGATIVE).to(tl.float32)
    if SCALED:
        values = values / divisor
    return values, tl.maximum(vocab / SAMPLE, 1.0)


@triton.jit
def _levels(top):
    """Below the largest entry of the sample, first close to each other; no entry is likely to lie on one of them."""
    near = (top - 0.01, top - 0.3, top - 0.6, top - 1.0, top - 1.5, top - 2.0, top - 2.5, top - 3.0)
    far = (top - 3.5, top - 4.0, top - 5.0, top - 6.0, top - 8.0, top - 12.0, top - 24.0, top - 64.0)
    return near, far


@triton.jit
def _below(values, weights, levels):
    """The weight of the values at or below each level."""
    turned = ()
    for j in tl.static_range(8):
        turned = turned + (-levels[j],)
    return reached(-values, weights, turned)


@triton.jit
def _narrowed(low, high, levels, sums, top, factor, left, counts, k, number):
    """The bracket after a look at eight levels: whether there is surely less mass than `left` below, or surely more;
    or surely, or surely not, k entries above, of a `number` sampled. No entry below a level weighs more than one at it,
    which bounds the variance of the estimate."""
    for j in tl.static_range(8):
        found = factor * tl.where(counts, number - sums[j], sums[j])
        spread = SURE * tl.sqrt(factor * tl.where(counts, 1.0, exponential(levels[j] - top)) * found)
        reaches = tl.where(counts, found - spread >= k, found + spread <= left)
        misses = tl.where(counts, found + spread < k, found - spread >= left)
        low, high = closer(low, high, levels[j], reaches, misses)
    return low, high
