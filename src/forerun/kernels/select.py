"""Which of the values a program holds is the last to be kept: no sorting, but comparisons with a few levels at once.

Device code. A *weight* is 1 where values are counted (top-k), and exp(value - peak) where mass is (top-p). The answer
is the largest value such that the weights of all values at or above it reach what is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import COMPILED, NEGATIVE

OTHERS = tl.constexpr(64)  # values that all are compared with at once


@triton.jit
def held(p, base, mass):
    """The mass, relative to the peak, that the nucleus must hold: p times the total as `log_sum_exp` rounds it."""
    exact = tl.log(mass)
    rounded = (base + exact.to(tl.float32)).to(tl.float64) - base  # see `law.log_mass_of`
    error = rounded - exact  # so small that a square of it is all an exponential needs
    return p * mass * (1.0 + error + 0.5 * error * error)


@triton.jit
def floor_of(least, base):
    """The threshold of min-p, -inf where there is none."""
    floor = tl.full((), NEGATIVE, tl.float32)
    if least > 0:
        floor = base + tl.log(least).to(tl.float32)
    return floor


@triton.jit
def bits_set(x):
    """How many bits of uint32 are."""
    if COMPILED:
        number = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        number = (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)
    return number


@triton.jit
def places(wanted):
    """Where each of [N, LANES] that is wanted would go if they stood one behind the other; how many they are. N <= 32.

    With LANES as many as threads hold side by side, a column is one thread's own, and a bit for each of its entries
    does what a running sum would, which takes many times as long.
    """
    bit = tl.full([wanted.shape[0], 1], 1, tl.uint32) << tl.arange(0, wanted.shape[0])[:, None].to(tl.uint32)
    column = tl.sum(tl.where(wanted, bit, 0), axis=0)
    number = bits_set(column)
    start = tl.cumsum(number, axis=0) - number
    return start[None, :] + bits_set(column[None, :] & (bit - 1)), tl.sum(number, axis=0)


@triton.jit
def _add(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def four(x0, x1, x2, x3):
    """A vector of four numbers."""
    i = tl.arange(0, 4)
    return tl.where(i < 2, tl.where(i == 0, x0, x1), tl.where(i == 2, x2, x3))


@triton.jit
def at_least(values, weights, x0, x1, x2, x3):
    """The weight of the values at or above each of four levels: [4].

    Four sums with one exchange between threads. A tensor of levels times values would be held by no thread.
    """
    s0, s1 = tl.where(values >= x0, weights, 0.0), tl.where(values >= x1, weights, 0.0)
    s2, s3 = tl.where(values >= x2, weights, 0.0), tl.where(values >= x3, weights, 0.0)
    if COMPILED:
        s0, s1, s2, s3 = tl.reduce((s0, s1, s2, s3), 0, _add)
    else:  # interpreted, a sum that is not the library's takes seconds
        s0, s1, s2, s3 = tl.sum(s0, axis=0), tl.sum(s1, axis=0), tl.sum(s2, axis=0), tl.sum(s3, axis=0)
    return four(s0, s1, s2, s3)


@triton.jit
def between(values, weights, low, high):
    """Four levels evenly spaced between two, and the weight at or above each."""
    step = (high - low) * 0.2
    x0, x1, x2, x3 = low + step, low + 2 * step, low + 3 * step, low + 4 * step
    return four(x0, x1, x2, x3), at_least(values, weights, x0, x1, x2, x3)


@triton.jit
def level_below(largest, weights, need, base):
    """A level that the answer certainly reaches, or -inf; `largest` are the largest values of disjoint groups.

    They are values themselves: if enough of their weight lies at or above a level, so does the answer. First far
    apart, then closer.
    """
    levels = four(base - 1.0, base - 4.0, base - 16.0, base - 64.0)
    enough = at_least(largest, weights, base - 1.0, base - 4.0, base - 16.0, base - 64.0) >= need
    low = tl.max(tl.where(enough, levels, NEGATIVE), axis=0)
    high = tl.min(tl.where(enough, base, levels), axis=0)
    for _ in range(2):
        levels, found = between(largest, weights, low, high)
        low, high = (
            tl.max(tl.where(found >= need, levels, low), axis=0),
            tl.min(tl.where(found < need, levels, high), axis=0),
        )
    return low


@triton.jit
def cut_few(values, num_values, base, mass, counts, k, holds, p, floor, FEW: tl.constexpr):
    """Threshold and kept mass of few values in memory, their weights behind them: each is compared with each."""
    place = tl.arange(0, FEW)
    there = place < num_values
    w = tl.load(values + place, mask=there, other=NEGATIVE)
    own = tl.load(values + FEW + place, mask=there, other=0.0).to(tl.float64)
    rank, reached = tl.zeros([FEW], tl.float32), tl.zeros([FEW], tl.float32)
    for start in range(0, num_values, OTHERS):
        other = start + tl.arange(0, OTHERS)
        v = tl.load(values + other, mask=other < num_values, other=NEGATIVE)
        weight = tl.load(values + FEW + other, mask=other < num_values, other=0.0)
        above = v[:, None] >= w[None, :]  # this way round every sum is one thread's own
        rank += tl.sum(tl.where(above, 1.0, 0.0), axis=0)
        reached += tl.sum(tl.where(above, weight[:, None], 0.0), axis=0)
    threshold = tl.full((), NEGATIVE, tl.float32)
    if counts:
        threshold = tl.max(tl.where(there & (rank >= k), w, NEGATIVE), axis=0)
        mass = tl.sum(tl.where(w >= threshold, own, 0.0), axis=0)
    if holds:
        nucleus = tl.max(tl.where(there & (reached >= held(p, base, mass)), w, NEGATIVE), axis=0)
        threshold = tl.maximum(threshold, nucleus)
    threshold = tl.maximum(threshold, floor)
    return threshold, tl.sum(tl.where(w >= threshold, own, 0.0), axis=0)
