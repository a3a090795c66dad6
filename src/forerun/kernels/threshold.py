"""The threshold of top-k, top-p and min-p: the short way, one program a row. Device code; `summary` launches it.

The pass over the logits leaves the largest of each group of entries, from which follows a level that the threshold
certainly reaches. Few groups reach it: their entries are read again, and those at or above it compared with each other.
Where there are too many, a sample of the row gives a bracket, and `wide` cuts it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.chunks import NOT_FOUND, side_of
from forerun.kernels.law import NEGATIVE, divisor_of, merged, warped
from forerun.kernels.search import cut_in_memory, mass_from
from forerun.kernels.select import LEVELS, cut_few, held, level_below

DONE = tl.constexpr(0)
BRACKETED = tl.constexpr(1)  # somewhere between two levels
SURE = tl.constexpr(3.0)  # standard deviations of an estimate, at least


@triton.jit
def threshold_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    peaks, masses, bests, groups,
    hot_groups,  # [R, HOT] int32, scratch
    values,  # [R, FEW] float32, scratch
    states,  # [R] int32, whether a row is done
    brackets,  # [R, 2] float32, of rows that are BRACKETED
    arrived,  # [R] int32, set to 0 for `wide`
    peak_out, mass_out, threshold_out, best_out,  # [R]
    p_rows, num_chunks, num_groups, extra,
    CHUNKS: tl.constexpr, DEEP: tl.constexpr, SUPER: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, FEW: tl.constexpr, SAMPLE: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr,
    SCALED: tl.constexpr, GREEDY: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks and find the threshold of top-k, top-p and min-p."""
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    top_k, top_p, min_p = p_top_k, p_top_p, p_min_p
    if HAS_DRAFT:
        drawn = r >= p_rows
        top_k, top_p = tl.where(drawn, q_top_k, top_k), tl.where(drawn, q_top_p, top_p)
        min_p = tl.where(drawn, q_min_p, min_p)
    length, heat = tl.load(lengths + b), tl.load(temperature + b)
    row = logits + tl.load(index + b * index_stride + i) * stride
    k, p, least = tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if WIDE:
        tl.store(states + r, DONE)
        tl.store(arrived + r, 0)
    if i < length + extra:
        chunk = tl.arange(0, CHUNKS)
        chunk_peak = tl.load(peaks + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(masses + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        divisor, plain = divisor_of(heat)
        peak, mass = merged(chunk_peak, chunk_mass, divisor, 0)
        if GREEDY:
            ids = tl.load(bests + r * num_chunks + chunk, mask=chunk < num_chunks, other=NOT_FOUND)
            tl.store(best_out + r, tl.min(tl.where(chunk_peak == peak, ids, NOT_FOUND), axis=0))
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        usable = (heat > 0) & (peak - peak == 0)
        counts, holds = usable & (k > 0) & (k < vocab), usable & (p < 1.0)
        floor = tl.where(usable & (least > 0), base + tl.log(least).to(tl.float32), NEGATIVE)
        threshold = floor
        if counts | holds:
            threshold, mass = _cut(
                row, r, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, groups, hot_groups, values,
                num_groups, states, brackets, DEEP, SUPER, HOT, GROUP, LANES, FEW, SAMPLE, SCAN, SCALED, WIDE,
            )  # fmt: skip
        elif floor > NEGATIVE:
            if WIDE:  # the mass above is all that is to come
                tl.store(states + r, BRACKETED)
                tl.store(brackets + 2 * r + tl.arange(0, 2), tl.zeros([2], tl.float32) + floor)
            else:
                mass = mass_from(row, vocab, shift, divisor, base, floor, SCAN, SCALED)
        tl.store(peak_out + r, peak)
        tl.store(mass_out + r, mass)
        tl.store(threshold_out + r, threshold)


@triton.jit
def _cut(
    row, r, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, groups, hot_groups, values, num_groups,
    states, brackets, DEEP: tl.constexpr, SUPER: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, FEW: tl.constexpr, SAMPLE: tl.constexpr, SCAN: tl.constexpr, SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of a row that top-k or top-p applies to, or (with WIDE) a note that both are to come."""
    group = tl.arange(0, DEEP)[:, None] * SUPER + tl.arange(0, SUPER)[None, :]
    largest = tl.load(groups + r * num_groups + group, mask=group < num_groups, other=NEGATIVE)
    largest = warped(largest, shift, divisor, SCALED)
    some = tl.max(largest, axis=0)
    weights = tl.where(counts, tl.where(some > NEGATIVE, 1.0, 0.0), tl.exp(some - base))
    need = tl.where(counts, k.to(tl.float64), p * mass * 1.0001)  # rounding must not raise the level
    level = level_below(some, weights, need.to(tl.float32), base)
    num_values, threshold = FEW + 1, level
    hot, few = hot_groups + r * HOT, values + r * FEW
    num_hot = _list(hot, group, largest >= level, HOT)
    if (level > NEGATIVE) & (num_hot <= HOT):
        w = _entries(row, hot, num_hot, vocab, shift, divisor, level, HOT, GROUP, LANES, SCALED)
        num_values = _list(few, w, w > NEGATIVE, FEW)
    if num_values <= FEW:
        threshold, mass = cut_few(few, num_values, base, mass, counts, k, holds, p, floor, FEW)
    elif WIDE:
        low, high = _bracket(row, vocab, shift, divisor, base, mass, counts, k, p, SAMPLE, SCALED)
        if not counts:
            low, high = tl.where(floor >= high, floor, low), tl.maximum(high, floor)
        tl.store(states + r, BRACKETED)
        tl.store(brackets + 2 * r, low)
        tl.store(brackets + 2 * r + 1, high)
    else:
        threshold, mass = cut_in_memory(
            row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN, SCALED
        )
    return threshold, mass


@triton.jit
def _list(out, values, wanted, ROOM: tl.constexpr):
    """Store those of [M, N] `values` that are wanted one behind the other, for all threads to read; how many."""
    wanted = wanted.to(tl.int32)
    columns = tl.sum(wanted, axis=0)
    slot = (tl.cumsum(columns, axis=0) - columns)[None, :] + tl.cumsum(wanted, axis=0) - 1
    tl.store(out + slot, values, mask=(wanted > 0) & (slot < ROOM))
    tl.debug_barrier()
    return tl.sum(columns, axis=0)


@triton.jit
def _entries(
    row, hot, num_hot, vocab, shift, divisor, level, HOT: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """All entries at or above `level`, which lie in the groups listed in `hot`, and -inf: [GROUP, HOT]."""
    place = tl.arange(0, HOT)
    group = tl.load(hot + place, mask=place < num_hot, other=0)
    column = (group // LANES * GROUP * LANES + group % LANES)[None, :] + tl.arange(0, GROUP)[:, None] * LANES
    w = tl.load(row + column, mask=(place < num_hot)[None, :] & (column < vocab), other=NEGATIVE).to(tl.float32)
    w = warped(w, shift, divisor, SCALED)
    return tl.where(w >= level, w, NEGATIVE)


@triton.jit
def _bracket(
    row, vocab, shift, divisor, base, mass, counts, k, p, SAMPLE: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Two levels between which the threshold of top-p very likely lies, or one that the k-th largest entry very likely
    reaches; whether it does is checked later.

    What a sample of the row holds below a level, scaled up, estimates the row's mass there; small entries are many, so
    it does so well. Eight neighbours at a time are read, spread over the row.
    """
    j = tl.arange(0, SAMPLE)
    spacing = tl.maximum(vocab // (SAMPLE // 8), 8)
    column = j // 8 * spacing + j % 8
    inside = column < vocab
    w = tl.load(row + column, mask=inside, other=NEGATIVE).to(tl.float32)
    w = warped(w, shift, divisor, SCALED)
    weights = tl.where(w > NEGATIVE, tl.where(counts, 1.0, tl.exp(w - base)), 0.0)
    factor = (vocab / tl.sum(inside.to(tl.int32), axis=0)).to(tl.float32)
    left = (mass - held(p, base, mass)).to(tl.float32)
    step = tl.arange(0, LEVELS)
    low, high = base - 104.0, base + 1.0
    levels = base + 0.5 - 0.5 * tl.exp2(8.0 / LEVELS * step.to(tl.float32))
    for _ in range(3):
        reaches, misses = _estimate(w, weights, levels, base, factor, left, counts, k)
        low = tl.max(tl.where(reaches, levels, low), axis=0)
        high = tl.min(tl.where(misses, levels, high), axis=0)
        levels = low + (high - low) * ((step + 1).to(tl.float32) / (LEVELS + 1))
    return low, tl.where(counts, base + 1.0, high)


@triton.jit
def _estimate(w, weights, levels, base, factor, left, counts, k):
    """Whether there is surely less mass than `left` below a level, and surely more; or surely, and surely not, k
    entries above. No entry below a level weighs more than one at it, which bounds the variance of the estimate."""
    wanted = tl.where(counts, w[None, :] >= levels[:, None], w[None, :] < levels[:, None])
    found = factor * tl.sum(tl.where(wanted, weights[None, :], 0.0), axis=1)
    spread = SURE * tl.sqrt(factor * tl.where(counts, 1.0, tl.exp(levels - base)) * found)
    reaches = tl.where(counts, found - spread >= k, found + spread <= left)
    return reaches, tl.where(counts, found + spread < k, found - spread >= left)
