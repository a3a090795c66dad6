"""The threshold of a nucleus too wide for one program: all of them together. Device code; `summary` launches it.

Every program takes a chunk of a row that has a bracket: it sums what lies above, and lists what lies inside. The last
one of the row cuts the list. Should the threshold not lie inside, or the list be full, it searches the row in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.chunks import side_of
from forerun.kernels.law import NEGATIVE, divisor_of, warped
from forerun.kernels.search import cut_in_memory
from forerun.kernels.select import cut_values, held
from forerun.kernels.threshold import DONE


@triton.jit
def wide_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    states, brackets,
    arrived,  # [R, 2] int32: entries listed, programs done
    above,  # [R, C] float64, mass above the bracket
    listed,  # [R, SIZE] float32
    peaks, masses, thresholds,  # [R]; the mass is the whole row's, and what is kept after this
    p_rows, num_chunks, extra,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and chunk of BLOCK entries; nothing to do where the row is done."""
    r, c = tl.program_id(0), tl.program_id(1)
    logits, index, temperature, stride, index_stride, vocab, b, i, extra = side_of(
        r, p_rows, extra,
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
        q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions, HAS_DRAFT,
    )  # fmt: skip
    row = logits + tl.load(index + b * index_stride + i) * stride
    heat = tl.load(temperature + b)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    state = tl.load(states + r)
    if state != DONE:
        divisor, plain = divisor_of(heat)
        peak = tl.load(peaks + r)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
        column = c * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
        w = warped(w, shift, divisor, SCALED)
        over = tl.where(w >= high, tl.exp(w - base), 0.0)
        tl.store(above + r * num_chunks + c, tl.sum(over.to(tl.float64), axis=0))
        inside = (w >= low) & (w < high)
        first = tl.atomic_add(arrived + 2 * r, tl.sum(inside.to(tl.int32), axis=0))
        slot = first + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(listed + r * SIZE + slot, w, mask=inside & (slot < SIZE))
        tl.debug_barrier()  # the count is one thread's; what the others stored comes before it
        if tl.atomic_add(arrived + 2 * r + 1, 1) == num_chunks - 1:
            top_k, top_p, min_p = p_top_k, p_top_p, p_min_p
            if HAS_DRAFT:
                drawn = r >= p_rows
                top_k, top_p = tl.where(drawn, q_top_k, top_k), tl.where(drawn, q_top_p, top_p)
                min_p = tl.where(drawn, q_min_p, min_p)
            _conclude(
                r, row, vocab, shift, divisor, base, tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b),
                brackets, arrived, above, listed, masses, thresholds, num_chunks, CHUNKS, SIZE, SCAN, SCALED,
            )  # fmt: skip


@triton.jit
def _conclude(
    r, row, vocab, shift, divisor, base, k, p, least,
    brackets, arrived, above, listed, masses, thresholds, num_chunks,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, SCAN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """All chunks of a row are there."""
    mass = tl.load(masses + r)
    floor = tl.where(least > 0, base + tl.log(least).to(tl.float32), NEGATIVE)
    counts, holds = (k > 0) & (k < vocab), p < 1.0
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
    over = tl.load(above + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0, cache_modifier=".cg")
    over = tl.sum(over, axis=0)
    within = tl.load(arrived + 2 * r, cache_modifier=".cg")
    w = tl.load(listed + r * SIZE + place, mask=place < within, other=NEGATIVE, cache_modifier=".cg")
    low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
    found = over + tl.sum(tl.where(w > NEGATIVE, tl.exp(w - base), 0.0).to(tl.float64), axis=0)
    need = tl.where(holds, held(p, base, mass), float("inf"))
    fits = (within <= SIZE) & tl.where(counts, within >= k, over < need)
    threshold = floor
    if fits & (counts == 0) & (floor >= high):
        mass = over
    elif fits & (counts | (found >= need)):
        threshold, mass = cut_values(w, base, mass, counts, k, holds, p, floor, low, high, over, 3)
    else:
        threshold, mass = cut_in_memory(
            row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN, SCALED
        )
    tl.store(masses + r, mass)
    tl.store(thresholds + r, threshold)
