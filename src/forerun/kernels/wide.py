"""The threshold where a row may keep any number of tokens: all programs together. Device code; `summary` launches it.

A sample of the row says between which two levels the threshold very likely lies (`bracket_kernel`, a program a row).
Then every program takes a part of a row: it sums what lies above, and lists what lies in between (`wide_kernel`). A
last one cuts the list (`settle_kernel`). Should the threshold not lie there, or the list be full, it searches the row
in memory. Separate launches, because a program that cuts takes the registers of many that list; each begins while the
one before it ends, and reads its logits meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.chunks import NOT_FOUND, cuts_of, side_of, sum_of
from forerun.kernels.law import NEGATIVE, divisor_of, exponential, merged, warped
from forerun.kernels.search import cut_in_memory
from forerun.kernels.select import at_least, cut_values, floor_of, four, held, places

DONE = tl.constexpr(0)
BRACKETED = tl.constexpr(1)  # somewhere between two levels
SURE = tl.constexpr(3.0)  # standard deviations of an estimate, at least
ROUNDS = tl.constexpr(4)  # of eight levels each
APART = tl.constexpr(32)  # between rows' counters, or programs of different rows would wait for each other


@triton.jit
def bracket_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    peaks, masses, bests,
    states,  # [R] int32, whether a row is done
    brackets,  # [R, 2] float32, of rows that are BRACKETED
    needs,  # [R] float64, the mass that its nucleus must hold
    arrived,  # [R, APART] int32, set to 0 for `wide_kernel`
    peak_out, mass_out, threshold_out, best_out,  # [R]
    p_rows, num_chunks, extra,
    CHUNKS: tl.constexpr, SAMPLE: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
    PDL: tl.constexpr,
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
    sample, inside = _sampled(row, vocab, used, SAMPLE)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    tl.store(states + r, DONE)
    tl.store(arrived + r * APART, 0)
    if used:
        chunk = tl.arange(0, CHUNKS)
        chunk_peak = tl.load(peaks + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(masses + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        divisor, plain = divisor_of(heat)
        peak, mass = merged(chunk_peak, chunk_mass, divisor, 0)
        if GREEDY:
            ids = tl.load(bests + r * num_chunks + chunk, mask=chunk < num_chunks, other=NOT_FOUND)
            tl.store(best_out + r, tl.min(tl.where(chunk_peak == peak, ids, NOT_FOUND), axis=0))
        tl.store(peak_out + r, peak)
        tl.store(mass_out + r, mass)
        tl.store(threshold_out + r, NEGATIVE)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        usable = (heat > 0) & (peak - peak == 0)
        counts, holds, floor = (k > 0) & (k < vocab), p < 1.0, floor_of(least, base)
        if usable & (counts | holds | (floor > NEGATIVE)):
            need = tl.where(holds, held(p, base, mass), float("inf"))
            low, high = floor, floor
            if counts | holds:
                w = warped(sample, shift, divisor, SCALED)
                low, high = _bracket(w, inside, vocab, base, (mass - need).to(tl.float32), counts, k)
                if not counts:
                    low, high = tl.where(floor >= high, floor, low), tl.maximum(high, floor)
            tl.store(states + r, BRACKETED)
            tl.store(brackets + 2 * r, low)
            tl.store(brackets + 2 * r + 1, high)
            tl.store(needs + r, need)


@triton.jit
def _sampled(row, vocab, used, SAMPLE: tl.constexpr):
    """Entries of the row, eight neighbours at a time, and which of them there are."""
    j = tl.arange(0, SAMPLE)
    column = j // 8 * tl.maximum(vocab // (SAMPLE // 8), 8) + j % 8
    inside = column < vocab
    return tl.load(row + column, mask=inside & used, other=NEGATIVE).to(tl.float32), inside


@triton.jit
def _bracket(w, inside, vocab, base, left, counts, k):
    """Two levels between which the threshold of top-p very likely lies, or one that the k-th largest entry very likely
    reaches; whether it does is checked later.

    What a sample `w` of the row holds below a level, scaled up, estimates the row's mass there; small entries are many,
    so it does so well. Below the threshold there is a mass of `left`.
    """
    weights = tl.where(w > NEGATIVE, tl.where(counts, 1.0, tl.exp(w - base)), 0.0)
    factor = (vocab / tl.sum(inside.to(tl.int32), axis=0)).to(tl.float32)
    low, high = base - 104.0, base + 1.0
    x0, x1, x2, x3 = base, base - 0.5, base - 1.5, base - 3.5  # each twice as far from the peak; then evenly spaced
    x4, x5, x6, x7 = base - 7.5, base - 15.5, base - 31.5, base - 63.5
    for _ in range(ROUNDS):
        low, high = _narrowed(w, weights, x0, x1, x2, x3, base, factor, left, counts, k, low, high)
        low, high = _narrowed(w, weights, x4, x5, x6, x7, base, factor, left, counts, k, low, high)
        step = (high - low) / 9
        x0, x1, x2, x3 = low + step, low + 2 * step, low + 3 * step, low + 4 * step
        x4, x5, x6, x7 = low + 5 * step, low + 6 * step, low + 7 * step, low + 8 * step
    return low, tl.where(counts, base + 1.0, high)


@triton.jit
def _narrowed(w, weights, x0, x1, x2, x3, base, factor, left, counts, k, low, high):
    """The bracket after a look at four levels: whether there is surely less mass than `left` below, and surely more; or
    surely, and surely not, k entries above. No entry below a level weighs more than one at it, which bounds the
    variance of the estimate."""
    levels, side = four(x0, x1, x2, x3), tl.where(counts, 1.0, -1.0)  # what lies below is above on the other side
    found = factor * at_least(w * side, weights, x0 * side, x1 * side, x2 * side, x3 * side)
    spread = SURE * tl.sqrt(factor * tl.where(counts, 1.0, tl.exp(levels - base)) * found)
    reaches = tl.where(counts, found - spread >= k, found + spread <= left)
    misses = tl.where(counts, found + spread < k, found - spread >= left)
    return tl.max(tl.where(reaches, levels, low), axis=0), tl.min(tl.where(misses, levels, high), axis=0)


@triton.jit
def wide_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    states, brackets,
    arrived,  # [R, APART] int32, entries listed
    above,  # [R, C] float64, mass above the bracket
    listed,  # [R, SIZE] float32, in any order
    peaks,  # [R]
    p_rows, num_chunks, extra,
    DEPTH: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and DEPTH x LANES entries; nothing to do where the row is done."""
    r, c = tl.program_id(0), tl.program_id(1)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    used = i < tl.load(lengths + b) + extra
    row = logits + tl.load(index + b * index_stride + i) * stride
    heat = tl.load(temperature + b)
    column = (c * DEPTH + tl.arange(0, DEPTH)[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    x = tl.load(row + column, mask=(column < vocab) & used, other=NEGATIVE)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if tl.load(states + r) != DONE:
        divisor, plain = divisor_of(heat)
        peak = tl.load(peaks + r)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
        w = warped(x.to(tl.float32), shift, divisor, SCALED)
        inside = (w >= low) & (w < high)
        slot, number = places(inside)
        start = tl.atomic_add(arrived + r * APART, number, sem="relaxed")
        tl.store(above + r * num_chunks + c, sum_of(tl.where(w >= high, exponential(w - base), 0.0)))
        tl.store(listed + r * SIZE + start + slot, w, mask=inside & (start + slot < SIZE))


@triton.jit
def settle_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    states, brackets, needs, arrived, above, listed,
    peaks, masses, thresholds,  # [R]; the mass is the whole row's, and what is kept after this
    p_rows, num_chunks, extra,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; nothing to do where the row is done."""
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    k, p, least = cuts_of(r, b, p_rows, p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p, HAS_DRAFT)
    row, heat = logits + tl.load(index + b * index_stride + i) * stride, tl.load(temperature + b)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if tl.load(states + r) != DONE:
        chunk, place = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
        w = tl.load(listed + r * SIZE + place)  # what is not there is cut off later: the number is still on its way
        over = tl.load(above + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
        peak, mass, need = tl.load(peaks + r), tl.load(masses + r), tl.load(needs + r)
        within = tl.load(arrived + r * APART)
        divisor, plain = divisor_of(heat)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        threshold, mass = _settled(
            row, vocab, shift, divisor, base, mass, need, k, p, floor_of(least, base),
            tl.where(place < within, w, NEGATIVE), within, tl.sum(over, axis=0), low, high, SIZE, SCAN, SCALED,
        )  # fmt: skip
        tl.store(masses + r, mass)
        tl.store(thresholds + r, threshold)


@triton.jit
def _settled(
    row, vocab, shift, divisor, base, mass, need, k, p, floor, w, within, over, low, high,
    SIZE: tl.constexpr, SCAN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of a row: `w` are the `within` values in its bracket, `over` is the mass above it."""
    counts, holds = (k > 0) & (k < vocab), p < 1.0
    weights = tl.where(w > NEGATIVE, tl.exp(w - base), 0.0)
    found = over + tl.sum(weights, axis=0) * 0.99999  # a little less than there is, whatever rounding does
    fits = (within <= SIZE) & tl.where(counts, within >= k, over < need)
    threshold = floor
    if fits & (counts == 0) & (floor >= high):
        mass = over
    elif fits & (counts | (found >= need)):
        threshold, mass = cut_values(w, weights, base, mass, counts, k, holds, p, need, floor, low, high, over)
    else:
        threshold, mass = cut_in_memory(
            row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN, SCALED
        )
    return threshold, mass
