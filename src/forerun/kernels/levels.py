"""How much of what a program holds lies at or above each of eight levels, and what that says of where an answer lies.

Device code. Eight sums take one exchange between threads. A tensor of levels times values would be held by no thread,
and a vector of eight numbers would be exchanged between threads again: what belongs to one level is a number by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import COMPILED


@triton.jit
def _add(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _is_from(values, level):
    """1 where a value is at or above a level, else 0: as numbers, because a thread has room for seven truths only."""
    if COMPILED:
        here = tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [values, level], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        here = tl.where(values >= level, 1.0, 0.0)
    return here


@triton.jit
def reached(values, weights, levels):
    """The weight of the values at or above each of eight levels; [N, THREADS, M], a thread's own first and last."""
    parts, sums = (), ()
    for j in tl.static_range(8):
        parts = parts + (tl.sum(tl.sum(weights * _is_from(values, levels[j]), axis=2), axis=0),)
    if COMPILED:
        sums = tl.reduce(parts, 0, _add)
    else:  # interpreted, a sum that is not the library's takes seconds
        for j in tl.static_range(8):
            sums = sums + (tl.sum(parts[j], axis=0),)
    return sums


@triton.jit
def spaced(low, high):
    """Eight levels evenly spaced between two."""
    levels, step = (), (high - low) * (1 / 9)
    for j in tl.static_range(8):
        levels = levels + (low + (j + 1) * step,)
    return levels


@triton.jit
def closer(low, high, level, reaches, misses):
    """Two levels around an answer after a look at a third, which the answer surely reaches, or surely does not."""
    return tl.where(reaches, tl.maximum(low, level), low), tl.where(misses, tl.minimum(high, level), high)
