"""The kernel of `support.shared`, apart because it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def meet(
    x, out, own, other, own_flag, other_flag, counts, number, capacity, rank, IS_SUM: tl.constexpr, SPINS: tl.constexpr
):  # fmt: skip
    """`out` [n] = this rank's x [n] + the other's; or [2, n], both by rank. One program, in its stream's order."""
    turn = tl.load(counts) + 1
    half = (turn % 2) * capacity
    places = tl.arange(0, 1024)
    for start in range(0, number, 1024):
        place = start + places
        part = tl.load(x + place, mask=place < number).to(tl.float32)
        tl.store(own + half + place, part, mask=place < number)
    tl.debug_barrier()  # all of it is there before the flag says so
    tl.atomic_xchg(own_flag, turn, sem="release", scope="sys")
    seen = tl.atomic_add(other_flag, 0, sem="acquire", scope="sys")
    spins = 0
    while (seen < turn) & (spins < SPINS) & (tl.load(counts + 2, volatile=True) == 0):
        seen = tl.atomic_add(other_flag, 0, sem="acquire", scope="sys")
        spins += 1
    if seen < turn:
        tl.store(counts + 1, tl.load(counts + 1) + 1)
    tl.debug_barrier()
    for start in range(0, number, 1024):
        place = start + places
        mine = tl.load(own + half + place, mask=place < number)
        theirs = tl.load(other + half + place, mask=place < number, volatile=True)
        if IS_SUM:
            tl.store(out + place, mine + theirs, mask=place < number)
        else:
            tl.store(out + rank * number + place, mine, mask=place < number)
            tl.store(out + (1 - rank) * number + place, theirs, mask=place < number)
    tl.debug_barrier()
    tl.store(counts, turn)
