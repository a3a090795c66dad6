"""The threshold of a nucleus too wide for one program: all of them together. Device code; `summary` launches it.

Every program of the first launch takes a chunk of a row that has a bracket: it sums what lies above, and lists what
lies inside. The second has a program a row, which cuts the list. Should the threshold not lie inside, or the list be
full, it searches the row in memory. Two launches, because a program that cuts takes the registers of many that list.
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
    states, brackets,
    arrived,  # [R] int32, entries listed
    above,  # [R, C] float64, mass above the bracket
    listed,  # [R, SIZE] float32
    peaks,  # [R]
    p_rows, num_chunks, extra,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
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
    if tl.load(states + r) != DONE:
        divisor, plain = divisor_of(heat)
        peak = tl.load(peaks + r)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)
        column = c * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
        w = warped(w, shift, divisor, SCALED)
        over = tl.where(w >= high, tl.exp(w - base), 0.0)
        tl.store(above + r * num_chunks + c, tl.sum(over.to(tl.float64), axis=0))
        inside = ((w >= low) & (w < high)).to(tl.int32)
        number = tl.sum(inside, axis=0)
        if number > 0:
            slot = tl.atomic_add(arrived + r, number) + tl.cumsum(inside, axis=0) - 1
            tl.store(listed + r * SIZE + slot, w, mask=(inside > 0) & (slot < SIZE))


@triton.jit
def settle_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    states, brackets, arrived, above, listed,
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
    top_k, top_p, min_p = p_top_k, p_top_p, p_min_p
    if HAS_DRAFT:
        drawn = r >= p_rows
        top_k, top_p = tl.where(drawn, q_top_k, top_k), tl.where(drawn, q_top_p, top_p)
        min_p = tl.where(drawn, q_min_p, min_p)
    row = logits + tl.load(index + b * index_stride + i) * stride
    k, p, least, heat = tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), tl.load(temperature + b)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if tl.load(states + r) != DONE:
        divisor, plain = divisor_of(heat)
        peak = tl.load(peaks + r)
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        threshold, mass = _settled(
            r, row, vocab, shift, divisor, base, tl.load(masses + r), k, p, least,
            brackets, arrived, above, listed, num_chunks, CHUNKS, SIZE, SCAN, SCALED,
        )  # fmt: skip
        tl.store(masses + r, mass)
        tl.store(thresholds + r, threshold)


@triton.jit
def _settled(
    r, row, vocab, shift, divisor, base, mass, k, p, least, brackets, arrived, above, listed, num_chunks,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, SCAN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of a row of which all chunks are there."""
    floor = tl.where(least > 0, base + tl.log(least).to(tl.float32), NEGATIVE)
    counts, holds = (k > 0) & (k < vocab), p < 1.0
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
    over = tl.sum(tl.load(above + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0), axis=0)
    within = tl.load(arrived + r)
    w = tl.load(listed + r * SIZE + place, mask=place < within, other=NEGATIVE)
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
    return threshold, mass
