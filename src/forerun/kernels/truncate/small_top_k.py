"""The threshold where every row has a small top-k: one program a row. Device code; `summary` launches it.

The pass over the logits leaves the largest of each group of entries, from which follows a level that the threshold
certainly reaches. Few groups reach it: their entries are read again, and those at or above it compared with each other.
Should there be more than expected (entries that are all alike), the row is searched in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import NEGATIVE, divisor_of, merged, peak_of, warped
from forerun.kernels.truncate.chunks import NOT_FOUND, cuts_of, side_of
from forerun.kernels.truncate.search import cut_in_memory
from forerun.kernels.truncate.select import cut_few, floor_of, level_below, places


@triton.jit(do_not_specialize=["num_groups"])
def small_top_k_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    peaks, masses, bests, groups,
    hot_groups,  # [R, HOT] int32, scratch
    values,  # [R, FEW] float32, scratch
    peak_out, mass_out, threshold_out, best_out,  # [R]
    p_rows, num_chunks, num_groups, extra,
    CHUNKS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, FEW: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks and find the threshold of top-k, top-p and min-p."""
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    k, p, least = cuts_of(r, b, p_rows, p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p, HAS_DRAFT)
    length, heat = tl.load(lengths + b), tl.load(temperature + b)
    row = logits + tl.load(index + b * index_stride + i) * stride
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if i < length + extra:
        chunk = tl.arange(0, CHUNKS)
        # where rows begin the compiler does not know, so it reads numbers one by one: a column is one thread's own
        group = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        largest = tl.load(groups + r * num_groups + group, mask=group < num_groups, other=NEGATIVE)
        chunk_peak = tl.load(peaks + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(masses + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        divisor, plain = divisor_of(heat)
        peak, mass = peak_of(chunk_peak, 0), tl.full((), 0.0, tl.float64)
        if GREEDY:
            ids = tl.load(bests + r * num_chunks + chunk, mask=chunk < num_chunks, other=NOT_FOUND)
            tl.store(best_out + r, tl.min(tl.where(chunk_peak == peak, ids, NOT_FOUND), axis=0))
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        usable = (heat > 0) & (peak - peak == 0)
        counts, holds = usable & (k > 0) & (k < vocab), usable & (p < 1.0)
        threshold = tl.full((), NEGATIVE, tl.float32)
        if not counts:  # nobody asks for the whole row's mass where top-k comes first
            _, mass = merged(chunk_peak, chunk_mass, divisor, 0)
        if usable:
            largest = warped(largest, shift, divisor, SCALED)
            level = level_below(tl.max(largest, axis=0), tl.where(counts, k, NOT_FOUND))
            floor = floor_of(least, base)
            num_values = FEW + 1
            hot, few = hot_groups + r * HOT, values + r * FEW
            slot, num_hot = places(largest >= level)
            _scatter(hot, slot, group, (largest >= level) & (slot < HOT))
            tl.debug_barrier()  # for all threads to read
            if (level > NEGATIVE) & (num_hot <= HOT):
                w = _entries(row, hot, num_hot, vocab, shift, divisor, level, HOT, GROUP, LANES, SCALED)
                place, num_values = places(w > NEGATIVE)
                _scatter(few, place, w, (w > NEGATIVE) & (place < FEW))
                tl.debug_barrier()
            if num_values <= FEW // 2:
                threshold, mass = cut_few(few, num_values, base, mass, counts, k, holds, p, floor, FEW // 2, FEW // 4)
            elif num_values <= FEW:
                threshold, mass = cut_few(few, num_values, base, mass, counts, k, holds, p, floor, FEW, FEW // 4)
            else:
                threshold, mass = cut_in_memory(
                    row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN, SCALED
                )
        tl.store(peak_out + r, peak)
        tl.store(mass_out + r, mass)
        tl.store(threshold_out + r, threshold)


@triton.jit
def _scatter(start, place, values, wanted):
    """Store [N, LANES] where they belong. Turned round, because of addresses it knows nothing of the compiler spreads
    the first axis over the threads, and would have to move everything if that were not the lanes."""
    tl.store(tl.trans(start + place), tl.trans(values), mask=tl.trans(wanted))


@triton.jit
def _entries(
    row, hot, num_hot, vocab, shift, divisor, level, HOT: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """All entries at or above `level`, which lie in the groups listed in `hot`, and -inf: [GROUP, HOT]."""
    place = tl.arange(0, HOT)
    group = tl.load(hot + place, mask=place < num_hot, other=0)
    column = (group // LANES * GROUP * LANES + group % LANES)[:, None] + tl.arange(0, GROUP)[None, :] * LANES
    w = tl.load(row + column, mask=(place < num_hot)[:, None] & (column < vocab), other=NEGATIVE).to(tl.float32)
    w = warped(w, shift, divisor, SCALED)
    return tl.trans(tl.where(w >= level, w, NEGATIVE))
