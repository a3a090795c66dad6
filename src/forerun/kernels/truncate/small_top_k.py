"""The threshold where every row has a small top-k: one program a row. Device code; `summary` launches it.

The pass over the logits leaves the largest of each group of entries, from which follows a level that the threshold
certainly reaches. Few groups reach it: their entries are read again, and those at or above it compared with each other.
Should there be more than expected (entries that are all alike), the row is searched in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import COUNTS, NEGATIVE, NONE, counted, divisor_of, merged, peak_of, warped
from forerun.kernels.truncate.chunks import cuts_of, row_start, side_of
from forerun.kernels.truncate.search import cut_in_memory
from forerun.kernels.truncate.select import cut_few, level_below, limits_of, places


@triton.jit(do_not_specialize=(*COUNTS, "p_rows", "num_groups"))
def small_top_k_kernel(
    lengths,
    p, q,  # LogitRows
    p_cuts, q_cuts,  # Truncation
    chunks,  # Summaries of chunks
    groups,
    hot_groups,  # [R, HOT] int32, scratch
    values,  # [R, FEW] float32, scratch
    out,  # Summaries of rows
    p_positions, p_index, q_positions, q_index, p_rows, num_chunks, num_groups, extra,
    CHUNKS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, FEW: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks and find the threshold of top-k, top-p and min-p."""
    r = tl.program_id(0)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    side, b, i, extra = side_of(r, p_rows, extra, p, q, HAS_DRAFT)
    cuts = cuts_of(r, b, p_rows, p_cuts, q_cuts, HAS_DRAFT)
    length, heat = tl.load(lengths + b), tl.load(side.temperature + b)
    row = row_start(side, b, i)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if i < length + extra:
        chunk = tl.arange(0, CHUNKS)
        # where rows begin the compiler does not know, so it reads numbers one by one: a column is one thread's own
        group = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        largest = tl.load(groups + r * num_groups + group, mask=group < num_groups, other=NEGATIVE)
        chunk_peak = tl.load(chunks.peak + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(chunks.mass + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        divisor, plain = divisor_of(heat)
        peak, mass = peak_of(chunk_peak, 0), tl.full((), 0.0, tl.float64)
        if GREEDY:
            ids = tl.load(chunks.best + r * num_chunks + chunk, mask=chunk < num_chunks, other=NONE)
            tl.store(out.best + r, tl.min(tl.where(chunk_peak == peak, ids, NONE), axis=0))
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        usable = (heat > 0) & (peak - peak == 0)
        limits = limits_of(cuts, base, side.vocab)
        threshold = tl.full((), NEGATIVE, tl.float32)
        if not (usable & limits.counts):  # the whole row's mass is not needed where top-k comes first
            _, mass = merged(chunk_peak, chunk_mass, divisor, 0)
        if usable:
            largest = warped(largest, shift, divisor, SCALED)
            level = level_below(tl.max(largest, axis=0), tl.where(limits.counts, limits.k, NONE))
            num_values = FEW + 1
            hot, few = hot_groups + r * HOT, values + r * FEW
            slot, num_hot = places(largest >= level)
            _scatter(hot, slot, group, (largest >= level) & (slot < HOT))
            tl.debug_barrier()  # for all threads to read
            if (level > NEGATIVE) & (num_hot <= HOT):
                w = _entries(row, hot, num_hot, side.vocab, shift, divisor, level, HOT, GROUP, LANES, SCALED)
                place, num_values = places(w > NEGATIVE)
                _scatter(few, place, w, (w > NEGATIVE) & (place < FEW))
                tl.debug_barrier()
            if num_values <= FEW // 2:
                threshold, mass = cut_few(few, num_values, base, mass, 0.0, limits, FEW // 2, FEW // 4)
            elif num_values <= FEW:
                threshold, mass = cut_few(few, num_values, base, mass, 0.0, limits, FEW, FEW // 4)
            else:
                threshold, mass = cut_in_memory(row, side.vocab, shift, divisor, base, mass, limits, SCAN, SCALED)
        tl.store(out.peak + r, peak)
        tl.store(out.mass + r, mass)
        tl.store(out.threshold + r, threshold)


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
