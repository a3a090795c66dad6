"""Philox4x32-10 in Triton, word for word `math.random`: the same keys give the same uniforms."""

from __future__ import annotations

import triton
import triton.language as tl

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)

ACCEPT = tl.constexpr(1)  # math.random.RandomStream
FINAL = tl.constexpr(2)


@triton.jit
def uniform(seed, request_id, round_, position, stream):
    """One float64 in [0, 1) with 53 bits a counter: seed and the three words after it scalars or tensors of int64."""
    c0 = request_id.to(tl.uint32) + tl.zeros_like(position).to(tl.uint32)
    c1 = round_.to(tl.uint32) + tl.zeros_like(position).to(tl.uint32)
    c2 = position.to(tl.uint32)
    c3 = tl.zeros_like(c2) + stream
    k0 = seed.to(tl.uint32) + tl.zeros_like(c2)
    k1 = (seed >> 32).to(tl.uint32) + tl.zeros_like(c2)
    for _ in tl.static_range(10):
        m0 = tl.full(c0.shape, MULTIPLIER_0, tl.uint32)
        m1 = tl.full(c2.shape, MULTIPLIER_1, tl.uint32)
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full(k0.shape, WEYL_0, tl.uint32)
        k1 += tl.full(k1.shape, WEYL_1, tl.uint32)
    bits = ((c0 >> 5).to(tl.int64) << 26) + (c1 >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16
