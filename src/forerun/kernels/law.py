"""One row's law inside a kernel: what `math.laws.warp` and `log_sum_exp` make of a logit, given the row's summary.

A summary is the peak (raw), the mass of what is kept relative to the peak (float64), the threshold below which tokens
are cut, and the most likely id of a greedy row (-1 for a sampled one).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from forerun.kernels.arguments import LogitRows

NEGATIVE = tl.constexpr(float("-inf"))
TINY = tl.constexpr(1.1754943508222875e-38)
HUGE = tl.constexpr(3.4028234663852886e38)
TILE = tl.constexpr(1024)  # math.laws.TILE
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(2147483647)  # an id or a position that no row has
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


class RowLaw(NamedTuple):
    """One side's law at every position of a row (vectors), or at one position (numbers)."""

    row: Any  # of the logits; where it begins, at one position
    shift: Any  # taken off a logit before it is divided
    divisor: Any  # one number in either case
    log_mass: Any
    threshold: Any
    best: Any


COUNTS = ("p_positions", "p_index", "q_positions", "q_index")  # of both sides, see `counted`


@triton.jit
def counted(side, positions, index_stride):
    """`LogitRows` with what a launch told of it beside the tuple."""
    return LogitRows(side.logits, side.index, side.temperature, side.stride, side.vocab, index_stride, positions)


@triton.jit
def exponential(x):
    """As the compiler makes it of a base-2 one: half the instructions, because numbers below 1e-38 become 0."""
    if COMPILED:
        y = tl.exp2(x * LOG2_E)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def inverse(x):
    """1 / x of numbers that are not tiny, to the last bit but one: an instruction where a division takes ten."""
    if COMPILED:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def divisor_of(temperature):
    """What logits are divided by, float32, and whether they are used as they are (temperature 1, or greedy)."""
    plain = (temperature == 1.0) | (temperature == 0.0)
    divisor = tl.where(plain, 1.0, temperature)
    return tl.minimum(tl.maximum(divisor, TINY), HUGE).to(tl.float32), plain


@triton.jit
def warped(w, shift, divisor, SCALED: tl.constexpr):
    if SCALED:
        w = tl.div_rn(w - shift, divisor)
    return w


@triton.jit
def peak_of(peaks, AXIS: tl.constexpr):
    """Of a row, from those of its chunks. NaN in a chunk makes the row's NaN."""
    bad = tl.max((peaks != peaks).to(tl.int32), axis=AXIS)
    return tl.where(bad > 0, float("nan"), tl.max(tl.where(peaks != peaks, NEGATIVE, peaks), axis=AXIS))


@triton.jit
def merged(peaks, masses, divisor, AXIS: tl.constexpr):
    """Peak and mass of a row from those of its chunks, along AXIS."""
    clean = tl.where(peaks != peaks, NEGATIVE, peaks)
    top = tl.max(clean, axis=AXIS, keep_dims=True)
    below = (clean - tl.where(top == NEGATIVE, 0.0, top)).to(tl.float64) / divisor
    mass = tl.sum(masses * tl.exp(below), axis=AXIS)
    return peak_of(peaks, AXIS), mass


@triton.jit
def log_mass_of(base, mass):
    """As `log_sum_exp` rounds it: the logarithm to float32 first, then the sum. `base` is the peak after warping."""
    return base + tl.log(mass).to(tl.float32)


@triton.jit
def probability(w, column, law, CUT: tl.constexpr, GREEDY: tl.constexpr):
    """Of tokens `column` with warped logits `w`, under one `RowLaw`."""
    p = exponential(w - law.log_mass)
    if CUT:
        p = tl.where(w < law.threshold, 0.0, p)
    if GREEDY:
        p = tl.where(law.best >= 0, (column == law.best).to(tl.float32), p)
    return p


@triton.jit
def log_probability(w, column, law, CUT: tl.constexpr, GREEDY: tl.constexpr):
    log_p = w - law.log_mass
    if CUT:
        log_p = tl.where(w < law.threshold, NEGATIVE, log_p)
    if GREEDY:
        log_p = tl.where(law.best >= 0, tl.where(column == law.best, 0.0, NEGATIVE), log_p)
    return log_p


@triton.jit
def pick(weights, u):
    """The first entry at which the running sum of float64 `weights` passes u times their total: `math.laws._pick`.

    Returns it, what of the goal is left inside it, and the total, which is NaN if any weight is.
    """
    total = tl.sum(weights, axis=0)
    entry, left = pick_goal(weights, u * total)
    return entry, left, total


@triton.jit
def pick_goal(weights, goal):
    running = tl.cumsum(weights, axis=0)
    column = tl.arange(0, weights.shape[0])
    size: tl.constexpr = weights.shape[0]
    # the first that passes, or else the last that weighs anything: one minimum, because every one costs a barrier
    late = tl.where(weights > 0, 2 * size - column, 2 * size)
    first = tl.min(tl.where(running > goal, column, late), axis=0)
    entry = tl.where(first < size, first, 2 * size - first)
    before = tl.max(tl.where(running <= goal, running, 0.0), axis=0)
    return entry, tl.where(first < size, goal - before, float("inf"))  # past the end nothing inside passes either
