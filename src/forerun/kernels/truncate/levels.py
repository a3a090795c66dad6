"""How much of what a program holds lies at or above each of eight levels. Device code.

The eight sums are one vector, so that they take one exchange between threads, and what is made of them one instruction
for all eight. Levels come twice, as eight numbers and as a vector: both by the same rounding (`tl.fma`), or a value
might lie between the two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.truncate.select import reaches


@triton.jit
def reached(values, weights, levels):
    """The weight of the values at or above each of eight levels, [8]; of [N, THREADS, M], a thread's own first and
    last."""
    parts = ()
    for j in tl.static_range(8):
        parts = parts + (tl.sum(tl.sum(weights * reaches(values, levels[j]), axis=2), axis=0),)
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    return tl.sum(tl.reshape(tl.join(even, odd), [values.shape[1], 8]), axis=0)


@triton.jit
def spaced(low, high):
    """Eight levels evenly spaced between two: as numbers, and as a vector."""
    levels, step = (), (high - low) * (1 / 9)
    for j in tl.static_range(8):
        levels = levels + (tl.fma(step, j + 1.0, low),)
    return levels, tl.fma(step + tl.zeros([8], tl.float32), tl.arange(0, 8) + 1.0, low + tl.zeros([8], tl.float32))


@triton.jit
def around(low, guess, high):
    """Eight levels around a guess, four on either side, each four times as far from it as the one before."""
    levels, up, down = (), high - guess, low - guess
    for j in tl.static_range(4):
        levels = levels + (tl.fma(up, 2.0 ** (2 * j - 7), guess),)
    for j in tl.static_range(4):
        levels = levels + (tl.fma(down, 2.0 ** (2 * j - 7), guess),)
    j = tl.arange(0, 8)
    part = (1 << (2 * (j % 4))).to(tl.float32) / 128.0
    return levels, tl.fma(tl.where(j < 4, up, down), part, guess + tl.zeros([8], tl.float32))
