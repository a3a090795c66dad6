"""What is kept of a row of logits instead of its probabilities: peak, mass, threshold, most likely id.

The pass over the logits reads every row once, in chunks spread over the device: each program leaves its chunk's peak,
and its mass relative to that (`chunks`). Where nothing is cut, whoever needs a row merges its chunks. Where something
is, the threshold is found without sorting the vocabulary: by `small_top_k`, or by `estimate`, `collect` and `resolve`
where a row may keep thousands of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from forerun.kernels.arguments import LogitRows, Summaries, Truncation
from forerun.kernels.truncate.chunks import chunk_kernel
from forerun.kernels.truncate.collect import collect_kernel
from forerun.kernels.truncate.estimate import APART, estimate_kernel
from forerun.kernels.truncate.resolve import resolve_kernel
from forerun.kernels.truncate.select import MOST_PLACES
from forerun.kernels.truncate.small_top_k import small_top_k_kernel
from forerun.kernels.tuning import Tuning, overlapping
from forerun.types import LawParams


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

    @property
    def argument(self) -> LogitRows:
        return LogitRows(self.logits, self.index, self.params.temperature, self.logits.stride(0), self.vocab)

    @property
    def counts(self) -> tuple[int, int]:
        """What a kernel puts into that, see `law.counted`."""
        return self.positions, self.index.stride(0)

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.params.top_k, self.params.top_p, self.params.min_p)

    def in_float32(self) -> Logits:
        return replace(self, logits=self.logits.float())

    @property
    def is_cut(self) -> bool:
        return self.params.any_top_k or self.params.any_top_p or self.params.any_min_p

    @property
    def may_be_wide(self) -> bool:
        """Whether a row may keep more tokens than the short way takes."""
        return self.is_cut and not self.params.all_small_top_k


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
        self.is_wide = any(side.may_be_wide for side in sides)
        self.vocab = vocab = max(side.vocab for side in sides)
        self.warps, self.group = tuning.warps, tuning.depth
        self.has_groups = self.is_cut and not self.is_wide
        if self.has_groups:
            self.group = min(max(8, triton.next_power_of_2(triton.cdiv(vocab, tuning.groups))), MOST_PLACES.value)
        elif self.rows * vocab >= tuning.many:
            self.warps, self.group = tuning.many_warps * target.logits.element_size() // 4, tuning.many_depth
        # of 16 bytes a thread, so that what lies LANES apart is one thread's own
        self.lanes = self.warps * 32 * 16 // target.logits.element_size()
        self.block = self.lanes * self.group
        self.num_chunks = triton.cdiv(vocab, self.block)
        self.num_groups = self.num_chunks * self.lanes
        self.groups: Tensor | None = None

    def chunks(self, lengths: Tensor, extra: int) -> Summaries:
        device, shape = lengths.device, (self.rows, self.num_chunks)
        peak = torch.empty(shape, dtype=torch.float32, device=device)
        mass = torch.empty(shape, dtype=torch.float64, device=device)
        best = torch.empty(shape if self.greedy else (1, 1), dtype=torch.int32, device=device)
        self.groups = torch.empty(self.rows if self.has_groups else 1, self.num_groups, device=device)
        sums = Summaries(peak, mass, peak, best)
        chunk_kernel[(self.rows, self.num_chunks)](
            lengths, *self._sides(), sums, self.groups, *self._counts(), self.target_rows, self.num_chunks, extra,
            GROUP=self.group, LANES=self.lanes, HAS_DRAFT=self.has_draft, SCALED=self.scaled, GREEDY=self.greedy,
            GROUPS=self.has_groups, **overlapping(device, self.tuning), num_warps=self.warps,
        )  # fmt: skip
        return sums

    def thresholds(self, sums: Summaries, lengths: Tensor, extra: int) -> Summaries:
        rows = self._empty_rows(lengths.device)
        (self._wide if self.is_wide else self._short)(sums, rows, lengths, extra)
        return rows

    def _short(self, sums: Summaries, rows: Summaries, lengths: Tensor, extra: int) -> None:
        """Every row has a small top-k."""
        device, tuning = lengths.device, self.tuning
        wide = max(tuning.super, triton.next_power_of_2(self.num_groups) // 32)
        groups = torch.empty(self.rows, tuning.hot, dtype=torch.int32, device=device)
        values = torch.empty(self.rows, tuning.few, dtype=torch.float32, device=device)
        small_top_k_kernel[(self.rows,)](
            lengths, *self._sides(), *self._cuts(), sums, self.groups, groups, values, rows,
            *self._counts(), self.target_rows, self.num_chunks, self.num_groups, extra,
            CHUNKS=triton.next_power_of_2(self.num_chunks), HOT=tuning.hot, GROUP=self.group,
            DEEP=triton.next_power_of_2(triton.cdiv(self.num_groups, wide)), WIDE=wide, LANES=self.lanes,
            FEW=tuning.few, SCAN=tuning.scan, GREEDY=self.greedy, **self._flags(device),
            num_warps=tuning.small_top_k_warps,
        )  # fmt: skip

    def _wide(self, sums: Summaries, rows: Summaries, lengths: Tensor, extra: int) -> None:
        """A row may keep any number of tokens."""
        device, tuning = lengths.device, self.tuning
        cutting = 32 * tuning.resolve_warps  # threads, of which each takes something
        size, few = max(tuning.listed, cutting), max(min(tuning.listed_few, tuning.listed), cutting)
        vector, threads = 16 // self.target.logits.element_size(), 32 * tuning.collect_warps
        depth = min(tuning.collect_bits, self.block // threads) // vector
        block = depth * threads * vector
        chunks = triton.cdiv(self.vocab, block)
        bracket = torch.empty(self.rows, 2, dtype=torch.float32, device=device)
        arrived = torch.empty(self.rows, APART.value, dtype=torch.int32, device=device)
        above = torch.empty(self.rows, chunks, dtype=torch.float64, device=device)
        listed = torch.empty(self.rows, size, dtype=torch.float32, device=device)
        sides, counts, cuts, shared = self._sides(), self._counts(), self._cuts(), self._flags(device)
        estimate_kernel[(self.rows,)](
            lengths, *sides, *cuts, sums, bracket, arrived, rows, *counts, self.target_rows, self.num_chunks, extra,
            CHUNKS=triton.next_power_of_2(self.num_chunks), SAMPLE=tuning.sample,
            THREADS=32 * tuning.estimate_warps, ROUNDS=tuning.estimate_rounds, GREEDY=self.greedy, **shared,
            num_warps=tuning.estimate_warps,
        )  # fmt: skip
        collect_kernel[(self.rows, chunks)](
            lengths, *sides, bracket, rows.peak, sums.peak, arrived, above, listed,
            *counts, self.target_rows, chunks, self.num_chunks, extra,
            DEPTH=depth, THREADS=threads, VECTOR=vector, EACH=self.block // block, SIZE=size, **shared,
            num_warps=tuning.collect_warps,
        )  # fmt: skip
        resolve_kernel[(self.rows,)](
            *sides, *cuts, bracket, arrived, above, listed, rows, *counts, self.target_rows, chunks,
            CHUNKS=triton.next_power_of_2(chunks), SIZE=size, MOST=tuning.listed, FEW=few, FEWEST=tuning.few,
            SCAN=tuning.scan, THREADS=cutting, **shared, num_warps=tuning.resolve_warps,
        )  # fmt: skip

    def _empty_rows(self, device: torch.device) -> Summaries:
        peak = torch.empty(self.rows, 1, dtype=torch.float32, device=device)
        mass = torch.empty(self.rows, 1, dtype=torch.float64, device=device)
        threshold = torch.empty(self.rows, dtype=torch.float32, device=device)
        best = torch.empty(self.rows if self.greedy else 1, 1, dtype=torch.int32, device=device)
        return Summaries(peak, mass, threshold, best)

    def _flags(self, device: torch.device) -> dict[str, Any]:
        return {"HAS_DRAFT": self.has_draft, "SCALED": self.scaled} | overlapping(device, self.tuning)

    def _cuts(self) -> tuple[Truncation, Truncation]:
        return self.target.truncation, self.draft.truncation

    def _sides(self) -> tuple[LogitRows, LogitRows]:
        return self.target.argument, self.draft.argument

    def _counts(self) -> tuple[int, ...]:
        return *self.target.counts, *self.draft.counts
