"""The threshold of a row by searching it in memory, over the bits of the answer: the last resort, by one program.

Device code. It is exact for any row, and reads it a dozen times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import NEGATIVE, warped
from forerun.kernels.truncate.select import held

SCAN_LEVELS = tl.constexpr(8)


@triton.jit
def cut_in_memory(
    row, vocab, shift, divisor, base, mass, limits, SCAN: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Count first, then mass; one loop, because this is most of the kernel's code."""
    threshold = tl.full((), NEGATIVE, tl.float32)
    for step in range(2):
        count = step == 0
        if (count & limits.counts) | ((step == 1) & limits.holds):
            need = tl.where(count, limits.k.to(tl.float64), held(limits.p, base, mass))
            value = _search(row, vocab, shift, divisor, base, threshold, count, need, SCAN, SCALED)
            threshold = tl.maximum(threshold, value)
        threshold = tl.where(count, threshold, tl.maximum(threshold, limits.floor))
        mass = mass_from(row, vocab, shift, divisor, base, threshold, SCAN, SCALED)
    return threshold, mass


@triton.jit
def mass_from(row, vocab, shift, divisor, base, threshold, SCAN: tl.constexpr, SCALED: tl.constexpr):
    """The mass of entries at or above `threshold`."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, SCAN):
        column = start + tl.arange(0, SCAN)
        w = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
        w = warped(w, shift, divisor, SCALED)
        mass += tl.sum(tl.where(w >= threshold, tl.exp(w - base), 0.0).to(tl.float64), axis=0)
    return mass


@triton.jit
def _search(row, vocab, shift, divisor, base, least, count, need, SCAN: tl.constexpr, SCALED: tl.constexpr):
    """The largest value such that the entries at or above it are `need` in number or mass; entries below `least` do
    not weigh. Floats of one order are integers of the same order, so a few passes settle all 32 bits."""
    low, high = _key(tl.full((), NEGATIVE, tl.float32)), _key(base) + 1
    step = tl.arange(0, SCAN_LEVELS).to(tl.int64) + 1
    while high - low > 1:
        levels = low + (high - low) * step // (SCAN_LEVELS + 1)
        reached = tl.zeros([SCAN_LEVELS], tl.float64)
        for start in range(0, vocab, SCAN):
            column = start + tl.arange(0, SCAN)
            w = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
            w = warped(w, shift, divisor, SCALED)
            weight = tl.where(count, 1.0, tl.where(w >= least, tl.exp(w - base), 0.0))
            weight = tl.where(column < vocab, weight, 0.0).to(tl.float64)
            above = _key(w)[None, :] >= levels[:, None]
            reached += tl.sum(tl.where(above, weight[None, :], 0.0), axis=1)
        enough = reached >= need
        low, high = tl.max(tl.where(enough, levels, low), axis=0), tl.min(tl.where(enough, high, levels), axis=0)
    return _value(low)


@triton.jit
def _key(value):
    """Integers in the order of the floats; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
