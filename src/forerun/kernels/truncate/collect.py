"""The threshold where a row may keep any number of tokens, second step: all programs together. Device code.

`estimate_kernel` left two levels between which the threshold very likely lies. Here every program takes a part of a
row: it sums the entries above both levels and lists the entries between them, from which `resolve_kernel` takes the
threshold. These are separate launches, because a program that resolves takes the registers of many that collect; each
begins while the one before it ends, and reads its logits meanwhile. Programs are small, so that many run at once while
each waits for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.law import COMPILED, COUNTS, NEGATIVE, counted, divisor_of, exponential, warped
from forerun.kernels.truncate.chunks import row_start, side_of, sum_of
from forerun.kernels.truncate.estimate import APART, DONE
from forerun.kernels.truncate.select import bits_set


@triton.jit(do_not_specialize=(*COUNTS, "p_rows"))
def collect_kernel(
    lengths,
    p, q,  # LogitRows
    brackets,
    peaks,  # [R]
    chunk_peaks,  # [R, chunks of the first pass], of which each is EACH of this one's
    arrived,  # [R, APART] int32, entries listed
    above,  # [R, C] float64, mass above the bracket
    listed,  # [R, SIZE] float32, in any order
    p_positions, p_index, q_positions, q_index, p_rows, num_chunks, num_peaks, extra,
    DEPTH: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr,
    HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and DEPTH x THREADS x VECTOR entries; nothing to do where the row is done."""
    r, c = tl.program_id(0), tl.program_id(1)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    side, b, i, extra = side_of(r, p_rows, extra, p, q, HAS_DRAFT)
    used = i < tl.load(lengths + b) + extra
    row = row_start(side, b, i)
    divisor, plain = divisor_of(tl.load(side.temperature + b))
    thread, step = tl.arange(0, THREADS)[:, None, None], tl.arange(0, DEPTH)[None, :, None]
    column = ((c * DEPTH + step) * THREADS + thread) * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    x = tl.load(row + column, mask=(column < side.vocab) & used, other=NEGATIVE)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    low, high = tl.load(brackets + 2 * r), tl.load(brackets + 2 * r + 1)  # all at once: each takes its time
    peak, largest = tl.load(peaks + r), tl.load(chunk_peaks + r * num_peaks + c // EACH)
    if low < DONE:
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        largest = warped(largest, shift, divisor, SCALED)
        mass = tl.full((), 0.0, tl.float64)
        if largest >= low:
            w = warped(x.to(tl.float32), shift, divisor, SCALED)
            bits = _inside(w, low, high)
            number = bits_set(bits)
            slot = tl.cumsum(number, axis=0) - number
            slot += tl.atomic_add(arrived + r * APART, tl.sum(number, axis=0), sem="relaxed")
            if largest >= high:
                far = tl.where(w >= high, exponential(w - base), 0.0)
                mass = sum_of(tl.reshape(tl.permute(far, (1, 0, 2)), [DEPTH, THREADS * VECTOR]))
            first = (c * DEPTH * THREADS + tl.arange(0, THREADS)) * VECTOR
            for _ in range(tl.max(number, axis=0)):  # one of each thread, read again: which register is not known
                entry = bits_set((bits & -bits) - 1)
                place = first + entry // VECTOR * (THREADS * VECTOR) + entry % VECTOR
                one = tl.load(row + place, mask=bits != 0, other=0.0).to(tl.float32)
                one = warped(one, shift, divisor, SCALED)
                tl.store(listed + r * SIZE + slot, one, mask=(bits != 0) & (slot < SIZE))
                bits, slot = bits & (bits - 1), slot + 1
        tl.store(above + r * num_chunks + c, mass)


@triton.jit
def _inside(w, low, high):
    """Which of what a thread holds lies from `low` to below `high`: [THREADS, DEPTH, VECTOR] become [THREADS] bits."""
    depth: tl.constexpr = w.shape[1]
    vector: tl.constexpr = w.shape[2]
    entry = tl.arange(0, depth)[None, :, None] * vector + tl.arange(0, vector)[None, None, :]
    bit = tl.full(w.shape, 1, tl.int32) << entry
    if COMPILED:  # a thread has room for seven truths only, and the compiler would find them all first
        set_bits = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.f32 p, $1, $2; setp.lt.and.f32 p, $1, $3, p; selp.b32 $0, $4, 0, p; }",
            "=r,f,f,f,r", [w, low, high, bit], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        set_bits = tl.where((w >= low) & (w < high), bit, 0)
    return tl.sum(tl.sum(set_bits, axis=2), axis=1).to(tl.uint32)
