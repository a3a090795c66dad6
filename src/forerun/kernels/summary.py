"""What is kept of a row of logits instead of its probabilities: peak, mass, threshold, most likely id.

Pass 1 reads every row once, in chunks spread over the device: each program leaves its chunk's peak, and its mass
relative to that. Where nothing is cut, whoever needs a row merges its chunks. Where something is, pass 2 finds the
threshold with one program a row and without sorting the vocabulary: pass 1 also leaves the largest of every few
entries, from which a level follows that certainly lies below the threshold; the few groups that reach it are read again
and sorted. Rows whose top is wider than that are searched in memory, by bits of the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.law import NEGATIVE, divisor_of, log_mass_of, merged, warped
from forerun.kernels.tuning import Tuning
from forerun.types import LawParams

NOT_FOUND = tl.constexpr(2147483647)
LEVELS = tl.constexpr(16)  # tried at once
SCAN_LEVELS = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class Logits:
    """Where the logits of a batch lie: position i of row b in row `index[b, i]`, one law's parameters a batch row."""

    logits: Tensor  # [N, V], last axis contiguous
    index: Tensor  # [B, P] int64
    params: LawParams  # B rows

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def positions(self) -> int:
        return self.index.shape[1]

    def in_float32(self) -> Logits:
        return replace(self, logits=self.logits.float())

    @property
    def is_cut(self) -> bool:
        return self.params.any_top_k or self.params.any_top_p or self.params.any_min_p


@dataclass(frozen=True, slots=True)
class Summaries:
    """Of all rows that were asked for: the target's [B, P] first, then the draft's [B, K]."""

    peak: Tensor  # [R, C] float32, of chunks; C = 1 where they are merged
    mass: Tensor  # [R, C] float64, relative to the peak, of what is kept
    threshold: Tensor  # [R] float32, after warping; only meaningful where something is cut
    best: Tensor  # [R, C] int32, only where some row is greedy

    @property
    def chunks(self) -> int:
        return self.peak.shape[1]


def summarise(
    target: Logits,
    lengths: Tensor,  # [B] int64
    draft: Logits | None,
    tuning: Tuning,
    extra: int = 1,
) -> Summaries:
    """Of positions 0 .. lengths[b] - 1 + extra of the target's rows, and 0 .. lengths[b] - 1 of the draft's."""
    work = _Work(target, draft, tuning)
    sums = work.chunks(lengths, extra)
    return work.thresholds(sums, lengths, extra) if work.is_cut else sums


class _Work:
    """Shapes and launches of both passes."""

    def __init__(self, target: Logits, draft: Logits | None, tuning: Tuning) -> None:
        if draft is not None and draft.logits.dtype != target.logits.dtype:  # one kernel reads both
            target, draft = target.in_float32(), draft.in_float32()
        self.target, self.draft, self.tuning = target, draft or target, tuning
        self.has_draft = draft is not None and draft.positions > 0
        sides = (target, self.draft)
        self.is_cut = any(side.is_cut for side in sides)
        self.scaled = any(side.params.any_scaled for side in sides)
        self.greedy = any(side.params.any_greedy for side in sides)
        self.batch = target.index.shape[0]
        self.target_rows = self.batch * target.positions
        self.rows = self.target_rows + (self.batch * self.draft.positions if self.has_draft else 0)
        vocab = max(side.vocab for side in sides)
        blocks = triton.cdiv(vocab, tuning.block)
        self.loops = tuning.many_loops if self.rows * blocks >= tuning.many_programs else 1
        self.num_chunks = triton.cdiv(blocks, self.loops)
        self.group = tuning.group if vocab <= 131072 else 2 * tuning.group
        self.num_groups = self.num_chunks * self.loops * tuning.block // self.group
        self.groups: Tensor | None = None

    def chunks(self, lengths: Tensor, extra: int) -> Summaries:
        device, shape = lengths.device, (self.rows, self.num_chunks)
        peak = torch.empty(shape, dtype=torch.float32, device=device)
        mass = torch.empty(shape, dtype=torch.float64, device=device)
        best = torch.empty(shape if self.greedy else (1, 1), dtype=torch.int32, device=device)
        self.groups = torch.empty(self.rows if self.is_cut else 1, self.num_groups, device=device)
        chunk_kernel[(self.rows, self.num_chunks)](
            *self._sides(lengths),
            peak, mass, best, self.groups,
            self.target_rows, self.num_chunks, self.num_groups, extra,
            LOOPS=self.loops, BLOCK=self.tuning.block, GROUP=self.group, HAS_DRAFT=self.has_draft, SCALED=self.scaled,
            GREEDY=self.greedy, GROUPS=self.is_cut, num_warps=self.tuning.warps,
        )  # fmt: skip
        return Summaries(peak, mass, peak, best)

    def thresholds(self, sums: Summaries, lengths: Tensor, extra: int) -> Summaries:
        device, hot = lengths.device, self.tuning.candidates // self.group
        peak = torch.empty(self.rows, 1, dtype=torch.float32, device=device)
        mass = torch.empty(self.rows, 1, dtype=torch.float64, device=device)
        threshold = torch.empty(self.rows, dtype=torch.float32, device=device)
        best = torch.empty(self.rows if self.greedy else 1, 1, dtype=torch.int32, device=device)
        cuts = (
            getattr(side.params, name)
            for side in (self.target, self.draft)
            for name in ("top_k", "top_p", "min_p")
        )  # fmt: skip
        padded = triton.next_power_of_2(self.num_groups)
        threshold_kernel[(self.rows,)](
            *self._sides(lengths), *cuts,
            sums.peak, sums.mass, sums.best, self.groups, torch.empty(self.rows, hot, dtype=torch.int32, device=device),
            peak, mass, threshold, best,
            self.target_rows, self.num_chunks, self.num_groups, extra,
            CHUNKS=triton.next_power_of_2(self.num_chunks), ALL_GROUPS=padded,
            SUPER=min(self.tuning.super_groups, padded), HOT=hot, GROUP=self.group, BLOCK=self.tuning.block,
            SCAN=self.tuning.scan, HAS_DRAFT=self.has_draft, SCALED=self.scaled, GREEDY=self.greedy,
            num_warps=self.tuning.threshold_warps,
        )  # fmt: skip
        return Summaries(peak, mass, threshold, best)

    def _sides(self, lengths: Tensor) -> list[Tensor | int]:
        found: list[Tensor | int] = [lengths]
        for side in (self.target, self.draft):
            found += [side.logits, side.index, side.params.temperature]
            found += [side.logits.stride(0), side.index.stride(0), side.vocab, side.positions]
        return found


@triton.jit
def chunk_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    peak_out, mass_out,  # [R, C]
    best_out,  # [R, C]
    groups_out,  # [R, G] the largest of each group
    p_rows, num_chunks, num_groups, extra,
    LOOPS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program a row and chunk of LOOPS x BLOCK entries."""
    LANES: tl.constexpr = BLOCK // GROUP  # out here: the compiler unrolls the loop and lets no constant be set twice
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, positions, place = (
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions, r
    )  # fmt: skip
    if HAS_DRAFT:
        drawn = r >= p_rows
        logits, index = tl.where(drawn, q_logits, logits), tl.where(drawn, q_index, index)
        temperature, stride = tl.where(drawn, q_temperature, temperature), tl.where(drawn, q_stride, stride)
        index_stride, vocab = tl.where(drawn, q_index_stride, index_stride), tl.where(drawn, q_vocab, vocab)
        positions, place = tl.where(drawn, q_positions, positions), tl.where(drawn, r - p_rows, r)
        extra = tl.where(drawn, 0, extra)
    b, i = place // positions, place % positions
    if i < tl.load(lengths + b) + extra:
        row = logits + tl.load(index + b * index_stride + i) * stride
        c = tl.program_id(1)
        divisor, _ = divisor_of(tl.load(temperature + b))
        peak = tl.full((), NEGATIVE, tl.float32)
        mass = tl.full((), 0.0, tl.float64)
        best = tl.full((), 0, tl.int32)
        for loop in tl.static_range(LOOPS):
            block = c * LOOPS + loop
            column = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
            clean = tl.where(x != x, NEGATIVE, x)
            top = tl.max(clean, axis=0)
            higher = tl.maximum(peak, top)
            safe = tl.where(higher == NEGATIVE, 0.0, higher)
            if SCALED:
                e = tl.exp(tl.div_rn(x - safe, divisor))
            else:
                e = tl.exp(x - safe)
            part = tl.sum(e.to(tl.float64), axis=0)
            if LOOPS == 1:
                mass = part
            else:
                mass = mass * tl.exp((peak - safe).to(tl.float64) / divisor) + part
            if GREEDY:
                first = tl.min(tl.where(clean == top, column, NOT_FOUND), axis=0)
                best = tl.where(top > peak, first, best)
            if GROUPS:
                largest = tl.max(tl.reshape(clean, [GROUP, LANES]), axis=0)
                tl.store(groups_out + r * num_groups + block * LANES + tl.arange(0, LANES), largest)
            peak = higher
        tl.store(peak_out + r * num_chunks + c, tl.where(mass != mass, float("nan"), peak))
        tl.store(mass_out + r * num_chunks + c, mass)
        if GREEDY:
            tl.store(best_out + r * num_chunks + c, best)


@triton.jit
def threshold_kernel(
    lengths,
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions,
    q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, q_positions,
    p_top_k, p_top_p, p_min_p, q_top_k, q_top_p, q_min_p,
    peaks, masses, bests, groups,
    hot,  # [R, HOT] int32, scratch
    peak_out, mass_out, threshold_out, best_out,  # [R]
    p_rows, num_chunks, num_groups, extra,
    CHUNKS: tl.constexpr, ALL_GROUPS: tl.constexpr, SUPER: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """One program a row: merge its chunks and find the threshold of top-k, top-p and min-p."""
    r = tl.program_id(0)
    logits, index, temperature, stride, index_stride, vocab, positions, place = (
        p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab, p_positions, r
    )  # fmt: skip
    top_k, top_p, min_p = p_top_k, p_top_p, p_min_p
    if HAS_DRAFT:
        drawn = r >= p_rows
        logits, index = tl.where(drawn, q_logits, logits), tl.where(drawn, q_index, index)
        temperature, stride = tl.where(drawn, q_temperature, temperature), tl.where(drawn, q_stride, stride)
        index_stride, vocab = tl.where(drawn, q_index_stride, index_stride), tl.where(drawn, q_vocab, vocab)
        positions, place = tl.where(drawn, q_positions, positions), tl.where(drawn, r - p_rows, r)
        extra = tl.where(drawn, 0, extra)
        top_k, top_p = tl.where(drawn, q_top_k, top_k), tl.where(drawn, q_top_p, top_p)
        min_p = tl.where(drawn, q_min_p, min_p)
    b, i = place // positions, place % positions
    if i < tl.load(lengths + b) + extra:
        row = logits + tl.load(index + b * index_stride + i) * stride
        chunk = tl.arange(0, CHUNKS)
        chunk_peak = tl.load(peaks + r * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE)
        chunk_mass = tl.load(masses + r * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
        heat = tl.load(temperature + b)
        divisor, plain = divisor_of(heat)
        peak, mass = merged(chunk_peak, chunk_mass, divisor, 0)
        if GREEDY:
            ids = tl.load(bests + r * num_chunks + chunk, mask=chunk < num_chunks, other=NOT_FOUND)
            tl.store(best_out + r, tl.min(tl.where(chunk_peak == peak, ids, NOT_FOUND), axis=0))
        shift, base = tl.where(plain, 0.0, peak), tl.where(plain, peak, 0.0)
        usable = (heat > 0) & (peak - peak == 0)
        k, p, least = tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
        counts, holds = usable & (k > 0) & (k < vocab), usable & (p < 1.0)
        floor = tl.where(usable & (least > 0), base + tl.log(least).to(tl.float32), NEGATIVE)
        threshold = floor
        if counts | holds:
            threshold, mass = _cut(
                row, r, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, groups, hot, num_groups,
                ALL_GROUPS, SUPER, HOT, GROUP, BLOCK, SCAN, SCALED,
            )  # fmt: skip
        elif floor > NEGATIVE:
            mass = _mass_from(row, vocab, shift, divisor, base, floor, SCAN, SCALED)
        tl.store(peak_out + r, peak)
        tl.store(mass_out + r, mass)
        tl.store(threshold_out + r, threshold)


@triton.jit
def _cut(
    row, r, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, groups, hot, num_groups,
    ALL_GROUPS: tl.constexpr, SUPER: tl.constexpr, HOT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of a row that top-k or top-p applies to."""
    group = tl.arange(0, ALL_GROUPS)
    largest = tl.load(groups + r * num_groups + group, mask=group < num_groups, other=NEGATIVE)
    largest = warped(largest, shift, divisor, SCALED)
    level = _level_below(largest, base, mass, counts, k, p, ALL_GROUPS, SUPER)
    reaches = largest >= level
    num_hot = tl.sum(reaches.to(tl.int32), axis=0)
    if (level > NEGATIVE) & (num_hot <= HOT):
        slot = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        tl.store(hot + r * HOT + slot, group, mask=reaches)
        tl.debug_barrier()
        threshold, mass = _cut_candidates(
            row, hot + r * HOT, num_hot, vocab, shift, divisor, base, mass, level, counts, k, holds, p, floor,
            HOT, GROUP, BLOCK, SCALED,
        )  # fmt: skip
    else:
        threshold, mass = _cut_in_memory(
            row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN, SCALED
        )
    return threshold, mass


@triton.jit
def _level_below(largest, base, mass, counts, k, p, ALL_GROUPS: tl.constexpr, SUPER: tl.constexpr):
    """A level that the threshold of top-k (else of top-p) certainly reaches, or -inf.

    The largest entries of disjoint groups are entries of the row: if k of them, or enough of their mass, lie at or
    above a level, so does the threshold. First a level for each power of two below the peak, then ever closer.
    """
    if ALL_GROUPS > SUPER:
        largest = tl.max(tl.reshape(largest, [ALL_GROUPS // SUPER, SUPER]), axis=0)
    weight = tl.where(counts, 1.0, tl.exp(largest - base).to(tl.float64))
    need = tl.where(counts, k.to(tl.float64), _held(p, base, mass) * 1.000001)  # rounding must not raise it
    step = tl.arange(0, LEVELS)
    levels = base - 0.25 * tl.exp2(step.to(tl.float32))
    enough = _at_least(largest, weight, levels) >= need
    low = tl.max(tl.where(enough, levels, NEGATIVE), axis=0)
    high = tl.min(tl.where(enough, base, levels), axis=0)
    found = low > NEGATIVE
    low = tl.where(found, low, high - 1.0)
    for _ in range(3):
        levels = low + (high - low) * ((step + 1).to(tl.float32) / (LEVELS + 1))
        enough = _at_least(largest, weight, levels) >= need
        low, high = (
            tl.max(tl.where(enough, levels, low), axis=0),
            tl.min(tl.where(enough, high, levels), axis=0),
        )
    return tl.where(found, low, NEGATIVE)


@triton.jit
def _at_least(values, weight, levels):
    """The weight of the values at or above each level."""
    return tl.sum(tl.where(values[None, :] >= levels[:, None], weight[None, :], 0.0), axis=1)


@triton.jit
def _held(p, base, mass):
    """The mass, relative to the peak, that the nucleus must hold: p times the total as `log_sum_exp` rounds it."""
    return p * tl.exp(log_mass_of(base, mass).to(tl.float64) - base)


@triton.jit
def _cut_candidates(
    row, hot, num_hot, vocab, shift, divisor, base, mass, level, counts, k, holds, p, floor,
    HOT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """All entries at or above `level` lie in the groups listed in `hot`: sort those."""
    LANES: tl.constexpr = BLOCK // GROUP
    place = tl.arange(0, HOT * GROUP)
    listed = place // GROUP < num_hot
    group = tl.load(hot + place // GROUP, mask=listed, other=0)
    column = group // LANES * BLOCK + place % GROUP * LANES + group % LANES
    w = tl.load(row + column, mask=listed & (column < vocab), other=NEGATIVE).to(tl.float32)
    w = warped(w, shift, divisor, SCALED)
    w = tl.sort(tl.where(w >= level, w, NEGATIVE), descending=True)
    e = tl.exp(w - base).to(tl.float64)
    threshold = tl.where(counts, tl.max(tl.where(place == k - 1, w, NEGATIVE), axis=0), NEGATIVE)
    kept = (w >= threshold) & (w > NEGATIVE)
    mass = tl.where(counts, tl.sum(tl.where(kept, e, 0.0), axis=0), mass)
    short = (tl.cumsum(e, axis=0) < _held(p, base, mass)) & kept
    last = tl.sum(short.to(tl.int32), axis=0)
    nucleus = tl.max(tl.where(place == last, w, NEGATIVE), axis=0)
    threshold = tl.maximum(tl.maximum(threshold, tl.where(holds, nucleus, NEGATIVE)), floor)
    return threshold, tl.sum(tl.where((w >= threshold) & (w > NEGATIVE), e, 0.0), axis=0)


@triton.jit
def _cut_in_memory(
    row, vocab, shift, divisor, base, mass, counts, k, holds, p, floor, SCAN: tl.constexpr, SCALED: tl.constexpr
):
    """Count first, then mass; one loop, because this is most of the kernel's code."""
    threshold = tl.full((), NEGATIVE, tl.float32)
    for step in range(2):
        count = step == 0
        if (count & counts) | ((step == 1) & holds):
            need = tl.where(count, k.to(tl.float64), _held(p, base, mass))
            found = _search(row, vocab, shift, divisor, base, threshold, count, need, SCAN, SCALED)
            threshold = tl.maximum(threshold, found)
        threshold = tl.where(count, threshold, tl.maximum(threshold, floor))
        mass = _mass_from(row, vocab, shift, divisor, base, threshold, SCAN, SCALED)
    return threshold, mass


@triton.jit
def _mass_from(row, vocab, shift, divisor, base, threshold, SCAN: tl.constexpr, SCALED: tl.constexpr):
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
            reached += _at_least(_key(w), weight, levels)
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
