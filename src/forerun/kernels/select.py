"""Which of the values a program holds is the last to be kept: no sorting, a few comparisons with many levels at once.

Device code. A *weight* is 1 where values are counted (top-k), and exp(value - peak) where mass is (top-p). The answer
is the largest value such that the weights of all values at or above it reach what is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import NEGATIVE, log_mass_of

LEVELS = tl.constexpr(16)  # tried at once of few values
MANY_LEVELS = tl.constexpr(4)  # of thousands, which a thread must be able to hold
ROUNDS = tl.constexpr(6)  # of that: thousands of values become a handful
OTHERS = tl.constexpr(32)  # values that all are compared with at once
ROUNDING = tl.constexpr(2e-6)  # more than a float32 sum of weights can be off, relatively


@triton.jit
def held(p, base, mass):
    """The mass, relative to the peak, that the nucleus must hold: p times the total as `log_sum_exp` rounds it."""
    return p * tl.exp(log_mass_of(base, mass).to(tl.float64) - base)


@triton.jit
def floor_of(least, base):
    """The threshold of min-p, -inf where there is none."""
    return tl.where(least > 0, base + tl.log(least).to(tl.float32), NEGATIVE)


@triton.jit
def at_least(values, weights, levels):
    """The weight of the values at or above each level."""
    return tl.sum(tl.where(values[None, :] >= levels[:, None], weights[None, :], 0.0), axis=1)


@triton.jit
def between(low, high, NUMBER: tl.constexpr):
    """So many levels, evenly spaced."""
    return low + (high - low) * ((tl.arange(0, NUMBER) + 1).to(tl.float32) / (NUMBER + 1))


@triton.jit
def level_below(largest, weights, need, base):
    """A level that the answer certainly reaches, or -inf; `largest` are the largest values of disjoint groups.

    They are values themselves: if enough of their weight lies at or above a level, so does the answer. First a level
    for each power of two below the peak, then closer.
    """
    levels = base - 0.25 * tl.exp2(tl.arange(0, LEVELS).to(tl.float32))
    enough = at_least(largest, weights, levels) >= need
    low = tl.max(tl.where(enough, levels, NEGATIVE), axis=0)
    high = tl.min(tl.where(enough, base, levels), axis=0)
    levels = between(low, high, LEVELS)
    enough = at_least(largest, weights, levels) >= need
    return tl.max(tl.where(enough, levels, low), axis=0)


@triton.jit
def cut_few(values, num_values, base, mass, counts, k, holds, p, floor, FEW: tl.constexpr):
    """Threshold and kept mass of few values in memory: each is compared with each."""
    place = tl.arange(0, FEW)
    w = tl.load(values + place, mask=place < num_values, other=NEGATIVE)
    rank, reached = tl.zeros([FEW], tl.float32), tl.zeros([FEW], tl.float64)
    for start in range(0, num_values, OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = other < num_values
        v = tl.load(values + other, mask=there, other=NEGATIVE)
        weight = tl.where(there, tl.exp(v - base), 0.0).to(tl.float64)
        above = (v[:, None] >= w[None, :]) & there[:, None]  # this way round every sum is one thread's own
        rank += tl.sum(tl.where(above, 1.0, 0.0), axis=0)
        reached += tl.sum(tl.where(above, weight[:, None], 0.0), axis=0)
    threshold = tl.where(counts, tl.max(tl.where(rank >= k, w, NEGATIVE), axis=0), NEGATIVE)
    kept = (w >= threshold) & (w > NEGATIVE)
    mass = tl.where(counts, tl.max(tl.where(kept, reached, 0.0), axis=0), mass)
    nucleus = tl.max(tl.where(reached >= held(p, base, mass), w, NEGATIVE), axis=0)
    threshold = tl.maximum(tl.maximum(threshold, tl.where(holds, nucleus, NEGATIVE)), floor)
    kept = (w >= threshold) & (w > NEGATIVE)
    return threshold, tl.max(tl.where(kept, reached, 0.0), axis=0)


@triton.jit
def just_short(values, weights, need, low, high):
    """A level little above the answer: the weight from there on is certainly less than `need`, as it is from `high`
    on. A float32 sum of at most `need` is off by a little of it."""
    for _ in range(ROUNDS):
        levels = between(low, high, MANY_LEVELS)
        reached = at_least(values, weights, levels)
        low, high = (
            tl.max(tl.where(reached >= need * (1 + ROUNDING), levels, low), axis=0),
            tl.min(tl.where(reached < need * (1 - ROUNDING), levels, high), axis=0),
        )
    return high


@triton.jit
def last_kept(values, weights, need, high):
    """The answer and the weight from it on, in float64: from `high` downwards, value by value."""
    reached = tl.sum(tl.where(values >= high, weights, 0.0).to(tl.float64), axis=0)
    value = high
    while (reached < need) & (value > NEGATIVE):
        value = tl.max(tl.where(values < value, values, NEGATIVE), axis=0)
        reached += tl.sum(tl.where(values == value, weights, 0.0).to(tl.float64), axis=0)
    return value, reached


@triton.jit
def cut_values(w, weights, base, mass, counts, k, holds, p, need, floor, low, high, above):
    """Threshold and kept mass where `w` are all values from `low` to `high`, and above that there is a mass `above`,
    of `need` in all (unless top-k comes first, before which nobody knows)."""
    threshold = low
    if counts:
        ones = tl.where(w > NEGATIVE, 1.0, 0.0)
        number = k.to(tl.float64)
        top = just_short(w, ones, number.to(tl.float32), low, high)
        threshold, _ = last_kept(w, ones, number, top)
        weights = tl.where(w >= threshold, weights, 0.0)
        mass = tl.sum(weights.to(tl.float64), axis=0)
        need = held(p, base, mass)
    if holds:
        rest = need - above
        top = just_short(w, weights, rest.to(tl.float32), threshold, high)
        threshold, mass = last_kept(w, weights, rest, top)
        mass += above
    if floor > threshold:
        threshold = floor
        mass = above + tl.sum(tl.where(w >= floor, weights, 0.0).to(tl.float64), axis=0)
    return threshold, mass
