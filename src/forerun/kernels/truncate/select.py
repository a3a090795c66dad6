"""Which of the values a program holds is the last to be kept: no sorting, but comparisons with a few levels at once.

Device code. A *weight* is 1 where values are counted (top-k), and exp(value - peak) where mass is (top-p). The answer
is the largest value such that the weights of all values at or above it reach what is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from forerun.kernels.law import COMPILED, NEGATIVE

MOST_PLACES = tl.constexpr(32)  # that `places` tells apart: bits of a number


class Limits(NamedTuple):
    """What truncation asks of one row: the `k` largest if `counts`, the mass `p` of those if `holds`, and nothing below
    `floor`."""

    counts: Any
    k: Any
    holds: Any
    p: Any
    floor: Any


@triton.jit
def limits_of(cuts, base, vocab):
    """From the parameters of a row (`Truncation`) and its largest value after warping."""
    counts, holds = (cuts.top_k > 0) & (cuts.top_k < vocab), cuts.top_p < 1.0
    return Limits(counts, cuts.top_k, holds, cuts.top_p, floor_of(cuts.min_p, base))


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
    """Where each of [N, LANES] that is wanted would go if they stood one behind the other; how many they are.

    With LANES as many as threads hold side by side, a column is one thread's own, and a bit for each of its entries
    does what a running sum would, which takes many times as long. More bits than MOST_PLACES there are not.
    """
    tl.static_assert(wanted.shape[0] <= MOST_PLACES)
    bit = tl.full([wanted.shape[0], 1], 1, tl.uint32) << tl.arange(0, wanted.shape[0])[:, None].to(tl.uint32)
    column = tl.sum(tl.where(wanted, bit, 0), axis=0)
    number = bits_set(column)
    start = tl.cumsum(number, axis=0) - number
    return start[None, :] + bits_set(column[None, :] & (bit - 1)), tl.sum(number, axis=0)


@triton.jit
def once(values, place, there):
    """Values in memory, as a maximum with a row of nothing: so that what comes of them is computed once and handed
    round, and not read and computed anew by every thread that needs it."""
    there = there[None, :] & (tl.arange(0, 2)[:, None] == 0)
    return tl.max(tl.load(values + place[None, :], mask=there, other=NEGATIVE), axis=0)


@triton.jit
def reaches(v, w):
    """1.0 where `v` >= `w`, else 0.0: one instruction. Left to itself the compiler packs such answers into bits."""
    if COMPILED:
        number = tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [v, w], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        number = (v >= w).to(tl.float32)
    return number


@triton.jit
def level_below(largest, k):
    """A level that at least `k` values reach, or -inf; `largest` [N] are the largest values of disjoint groups.

    They are values themselves, and so are the levels that are tried: whatever the values, those lie a few ranks apart,
    closer together where k is small (of eight values the largest among the smaller ones of four pairs).
    """
    halves = tl.min(tl.reshape(largest, [largest.shape[0] // 8, 4, 2]), axis=2)
    levels = tl.max(halves, axis=1)
    number = tl.sum(reaches(largest[:, None], levels[None, :]), axis=0)
    return tl.max(tl.where(number >= k, levels, NEGATIVE), axis=0)


@triton.jit
def _last_and_least(value, reached, other_value, other_reached):
    return tl.maximum(value, other_value), tl.minimum(reached, other_reached)


@triton.jit
def _last_of(enough, w, reached):
    """The largest value that has enough, and what it reaches: the least of those, because both are in one order."""
    value, least = tl.where(enough, w, NEGATIVE), tl.where(enough, reached, float("inf"))
    if COMPILED:  # one exchange between threads
        value, least = tl.reduce((value, least), 0, _last_and_least)
    else:
        value, least = tl.max(value, axis=0), tl.min(least, axis=0)
    return value, least


@triton.jit
def _ranked(values, num_values, w, base, OTHERS: tl.constexpr):
    """How many values in memory are at or above each of `w`, and their mass in float64.

    Every weight is cut in two float32 numbers: multiples of 2^-15, whose sums are exact, and the little that is left.
    """
    rank = tl.zeros(w.shape, tl.float32)
    coarse, fine = rank, rank
    for start in range(0, num_values, OTHERS):
        other = start + tl.arange(0, OTHERS)
        v = once(values, other, other < num_values)
        weight = tl.exp(v - base)
        most = (weight + 256.0) - 256.0
        above = reaches(v[:, None], w[None, :])  # this way round every sum is one thread's own
        rank += tl.sum(above, axis=0)
        coarse += tl.sum(above * most[:, None], axis=0)
        fine += tl.sum(above * (weight - most)[:, None], axis=0)
    return rank, coarse.to(tl.float64) + fine


@triton.jit
def cut_few(values, num_values, base, mass, over, limits, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """Threshold and kept mass of few values in memory: each is compared with each, OTHERS at once.

    Above all of them there is a mass `over`; the row's is `mass`. The threshold is -inf where not even all of them are
    enough.
    """
    place = tl.arange(0, FEW)
    w = tl.load(values + place, mask=place < num_values, other=NEGATIVE)
    rank, reached = _ranked(values, num_values, w, base, OTHERS)
    reached += over
    threshold = tl.full((), NEGATIVE, tl.float32)
    if limits.counts:
        threshold, mass = _last_of(rank >= limits.k, w, reached)
    if limits.holds:
        nucleus, least = _last_of(reached >= held(limits.p, base, mass), w, reached)
        threshold, mass = tl.maximum(threshold, nucleus), tl.minimum(mass, least)
    if limits.floor > threshold:
        threshold, mass = limits.floor, tl.max(tl.where(w >= limits.floor, reached, over), axis=0)
    return threshold, mass
