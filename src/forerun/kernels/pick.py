"""Where a uniform falls: in which part of which tile of a row, then on which entry of that. Device code of `draw`.

Tiles are `math.laws.TILE`; a part is what one warp adds up alone. From then on every warp does all of the work for
itself, on vectors that it holds whole: one program draws while the device waits, and a barrier costs it more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.law import NEGATIVE, TILE, probability, warped

PART = tl.constexpr(128)
PARTS = tl.constexpr(8)  # of a tile
LANES = tl.constexpr(32)  # of a warp
EACH = tl.constexpr(4)  # entries of a part that a lane has


@triton.jit
def part_sums(values, TILES: tl.constexpr):
    """Float64 sums of parts of [TILES, TILE] weights; of four neighbours in float32, whose rounding averages out."""
    fours = tl.sum(tl.reshape(values, [TILES, PARTS, PART // 4, 4]), axis=3)
    return tl.sum(fours.to(tl.float64), axis=2)


@triton.jit
def summed(sums, num_tiles, ALL: tl.constexpr):
    """The sums of all parts [num_tiles, PARTS]: a tuple of PARTS vectors [ALL]."""
    tile = tl.arange(0, ALL)
    found = ()
    for j in tl.static_range(PARTS):
        found += (tl.load(sums + tile * PARTS + j, mask=tile < num_tiles, other=0.0, cache_modifier=".cg"),)
    return found


@triton.jit
def pick_part(sums, scale, u):
    """The part in which u falls, counted through all tiles, what of the goal is left inside it, and the total.

    Sums of a tile are multiplied by its `scale`; a tile with NaN or infinity in it counts as empty.
    """
    own = sums[0]
    for j in tl.static_range(1, PARTS):
        own += sums[j]
    whole = (own == own) & (own < float("inf"))
    weights = ()
    for j in tl.static_range(PARTS):
        weights += (tl.where(whole, sums[j] * scale, 0.0),)
    total = tl.sum(tl.where(whole, own * scale, 0.0), axis=0)
    part, rest = pick_among(weights, u * total, PARTS)
    return part, rest, total


@triton.jit
def pick_among(weights, goal, NUMBER: tl.constexpr):
    """The first entry at which the running sum of float64 weights passes `goal`, and what of that is left inside it.

    `math.laws._pick` for `weights` that are a tuple of NUMBER vectors: what stands at one place of all of them are
    neighbours. Past the end, where only rounding can carry a goal, it is the last entry that weighs anything.
    """
    place = tl.arange(0, weights[0].shape[0])
    own = weights[0]
    for j in tl.static_range(1, NUMBER):
        own += weights[j]
    size: tl.constexpr = weights[0].shape[0] * NUMBER
    running, before = tl.cumsum(own, axis=0) - own, tl.zeros_like(own)
    found = tl.full(place.shape, size, tl.int32)
    for j in tl.static_range(NUMBER):
        running += weights[j]
        found = tl.minimum(found, tl.where(running > goal, place * NUMBER + j, size))
        before = tl.where(running <= goal, running, before)
    entry, rest = tl.min(found, axis=0), goal - tl.max(before, axis=0)
    if entry == size:
        last = tl.zeros_like(found)
        for j in tl.static_range(NUMBER):
            last = tl.where(weights[j] > 0, place * NUMBER + j, last)
        entry, rest = tl.max(last, axis=0), tl.full((), float("inf"), tl.float64)  # nothing inside it passes either
    return entry, rest


@triton.jit
def pick_from_p(
    row, u, shift, divisor, log_mass, threshold, best, vocab, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """The part of p in which u falls, one tile after the other, then its parts: as good as never needed."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        total += _span_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, TILE, SCALED, CUT, GREEDY)
    first, rest = _pick_span(
        row, 0, vocab, u * total, shift, divisor, log_mass, threshold, best, vocab, TILE, SCALED, CUT, GREEDY
    )
    first, rest = _pick_span(
        row, first, first + TILE, rest, shift, divisor, log_mass, threshold, best, vocab, PART, SCALED, CUT, GREEDY
    )
    return first // PART, rest


@triton.jit
def _pick_span(
    row, first, end, goal, shift, divisor, log_mass, threshold, best, vocab, SPAN: tl.constexpr, SCALED: tl.constexpr,
    CUT: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Where between two columns a span begins in which the goal falls, and what of it is left there."""
    before, found, rest = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32) + first, goal
    for start in range(first, end, SPAN):
        own = _span_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, SPAN, SCALED, CUT, GREEDY)
        here = (own > 0) & (before <= goal)
        found, rest = tl.where(here, start, found), tl.where(here, goal - before, rest)
        before += own
    return found, rest


@triton.jit
def _span_sum(
    row, start, shift, divisor, log_mass, threshold, best, vocab, SPAN: tl.constexpr, SCALED: tl.constexpr,
    CUT: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, SPAN)
    x = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
    p = probability(warped(x, shift, divisor, SCALED), column, log_mass, threshold, best, CUT, GREEDY)
    return tl.sum(tl.where(column < vocab, p, 0.0).to(tl.float64), axis=0)
