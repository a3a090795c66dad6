"""The pass over all logits: what one chunk of a row leaves behind. Device code; `summary` launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.kernels.arguments import LogitRows, Truncation
from forerun.kernels.law import COUNTS, NEGATIVE, NONE, counted, divisor_of, exponential


@triton.jit
def side_of(r, p_rows, extra, p, q, HAS_DRAFT: tl.constexpr):
    """Whose row `r` of the summaries is, as `LogitRows`, its batch row and position, and how many positions more than
    the draft's length are in use: the target's rows come first, then the draft's."""
    side, place = p, r
    if HAS_DRAFT:
        drawn = r >= p_rows
        side = LogitRows(
            tl.where(drawn, q.logits, p.logits),
            tl.where(drawn, q.index, p.index),
            tl.where(drawn, q.temperature, p.temperature),
            tl.where(drawn, q.stride, p.stride),
            tl.where(drawn, q.vocab, p.vocab),
            tl.where(drawn, q.index_stride, p.index_stride),
            tl.where(drawn, q.positions, p.positions),
        )
        place = tl.where(drawn, r - p_rows, r)
        extra = tl.where(drawn, 0, extra)
    return side, place // side.positions, place % side.positions, extra


@triton.jit
def row_start(side, b, i):
    """Where the logits of position `i` of batch row `b` begin."""
    return side.logits + tl.load(side.index + b * side.index_stride + i) * side.stride


@triton.jit
def cuts_of(r, b, p_rows, p, q, HAS_DRAFT: tl.constexpr):
    """Top-k, top-p and min-p of row `r` of the summaries."""
    top_k, top_p, min_p = p.top_k, p.top_p, p.min_p
    if HAS_DRAFT:
        drawn = r >= p_rows
        top_k, top_p = tl.where(drawn, q.top_k, top_k), tl.where(drawn, q.top_p, top_p)
        min_p = tl.where(drawn, q.min_p, min_p)
    return Truncation(tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b))


@triton.jit
def sum_of(values):
    """The float64 sum of float32 numbers, [N, LANES] with N a power of two.

    Converting every number to float64 takes as long as its exponential. The few of a lane are added in pairs, then
    pairs of pairs: errors of either sign, which average out over the lanes, and none at all where numbers are equal.
    """
    for _ in tl.static_range(16):
        if values.shape[0] > 1:
            values = tl.sum(tl.reshape(values, [2, values.shape[0] // 2, values.shape[1]]), axis=0)
    return tl.sum(tl.sum(values, axis=0).to(tl.float64), axis=0)


@triton.jit(do_not_specialize=(*COUNTS, "p_rows"))
def chunk_kernel(
    lengths,
    p, q,  # LogitRows
    out,  # Summaries, without thresholds
    groups_out,  # [R, G] the largest of each group
    p_positions, p_index, q_positions, q_index, p_rows, num_chunks, extra,
    GROUP: tl.constexpr, LANES: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and chunk of GROUP x LANES entries; a group is what lies LANES apart."""
    r, c = tl.program_id(0), tl.program_id(1)
    p, q = counted(p, p_positions, p_index), counted(q, q_positions, q_index)
    side, b, i, extra = side_of(r, p_rows, extra, p, q, HAS_DRAFT)
    if PDL:  # in this order: those that follow read logits before they wait
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    length = tl.load(lengths + b)
    row = row_start(side, b, i)
    if i < length + extra:
        lane = c * GROUP * LANES + tl.arange(0, LANES)
        column = tl.arange(0, GROUP)[:, None] * LANES + lane[None, :]
        x = tl.load(row + column, mask=column < side.vocab, other=NEGATIVE).to(tl.float32)
        largest = tl.max(x, axis=0)
        peak = tl.max(largest, axis=0)
        below = x - tl.where(peak == NEGATIVE, 0.0, peak)
        if SCALED:
            divisor, _ = divisor_of(tl.load(side.temperature + b))
            below = tl.div_rn(below, divisor)
        mass = sum_of(exponential(below))
        tl.store(out.peak + r * num_chunks + c, tl.where(mass != mass, float("nan"), peak))
        tl.store(out.mass + r * num_chunks + c, mass)
        if GREEDY:
            first = tl.min(tl.min(tl.where(x == peak, column, NONE), axis=0), axis=0)
            tl.store(out.best + r * num_chunks + c, first)
        if GROUPS:
            tl.store(groups_out + (r * num_chunks + c) * LANES + tl.arange(0, LANES), largest)
