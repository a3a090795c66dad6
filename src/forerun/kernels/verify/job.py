"""Shapes and launches of one verification, or of one draw from rows of logits."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from forerun.kernels.arguments import Case, DraftTensors, KeyRows, Summaries, Workspace
from forerun.kernels.counters import counters
from forerun.kernels.law import TILE
from forerun.kernels.truncate.summary import Logits, summarise
from forerun.kernels.tuning import Tuning, overlapping
from forerun.kernels.verify.acceptance import BLOCK_RULE, GREEDY_RULE, SIGMOID
from forerun.kernels.verify.draft_law import Proposal
from forerun.kernels.verify.draw import HEAD, pick_kernel, sum_kernel
from forerun.types import Draft, Keys

FEW_POSITIONS = 8  # up to so many of a row take one variant: lanes of one warp, which fewer would leave idle


class Job:
    """Shapes and launches of one verification."""

    def __init__(
        self,
        target: Logits,
        draft: Draft,
        proposal: Proposal,
        rule: int,
        keys: Keys,
        tuning: Tuning,
        uniforms: Tensor | None = None,  # [B] float64, the final draw's, in place of the keys'
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.target, self.draft, self.proposal, self.rule, self.keys = target, draft, proposal, rule, keys
        self.tuning, self.uniforms, self.bounds = tuning, uniforms, bounds
        self.drawn = proposal.logits or target
        self.batch, self.positions = len(draft.lengths), draft.width + 1
        self.is_cut = target.is_cut or (proposal.logits is not None and proposal.logits.is_cut)
        self.scaled = target.params.any_scaled or self.drawn.params.any_scaled
        self.greedy = target.params.any_greedy or self.drawn.params.any_greedy
        self.summed = rule != SIGMOID.value or self.is_cut
        self.num_tiles = triton.cdiv(target.vocab, TILE.value)
        self.parts = self.positions if rule == BLOCK_RULE.value else 1  # positions at which sums are wanted
        self.tiles, self.loops, self.splits = self._division()
        self.last_draws = tuning.last_draws and self.loops == 1  # a program that also draws takes more registers
        self.summaries = self._summaries()

    def _division(self) -> tuple[int, int, int]:
        """Tiles a program takes at once, how often, and programs a row: once, unless the device is full with that."""
        if self.rule == GREEDY_RULE.value:
            return 1, 1, 1
        rows, tuning = self.batch * self.parts, self.tuning
        tiles = triton.next_power_of_2(triton.cdiv(rows * self.num_tiles, tuning.sum_programs))
        if tiles < tuning.tiles:
            return tiles, 1, triton.cdiv(self.num_tiles, tiles)
        splits = min(max(1, tuning.loop_programs // rows), triton.cdiv(self.num_tiles, tuning.tiles))
        loops = triton.cdiv(self.num_tiles, tuning.tiles * splits)
        return tuning.tiles, loops, triton.cdiv(self.num_tiles, tuning.tiles * loops)

    def _summaries(self) -> Summaries:
        if not self.summed:  # any tensors: nothing of them is read
            logits = self.target.logits
            return Summaries(logits[:1], logits[:1], logits[:1], logits[:1])
        every = self.proposal.logits if self.proposal.kept is None else None
        summaries = summarise(self.target, self.draft.lengths, every, self.tuning)
        if self.is_cut and every is None and not self.target.is_cut:  # the draft's thresholds are kept, and it has none
            summaries = summaries._replace(threshold=summaries.peak.new_full((len(summaries.peak),), -torch.inf))
        return summaries

    def run(self) -> Tensor:
        """Two launches, or three; more where something is cut. The sigmoid rule takes one where nothing is."""
        device = self.target.logits.device
        out = torch.empty(self.batch, HEAD.value + self.positions, dtype=torch.int64, device=device)
        sums = torch.empty(self.batch * self.parts * self.num_tiles, dtype=torch.float64, device=device)
        num_peaks = 0 if self.summed else self.batch * self.splits * self.loops
        peaks = torch.empty(num_peaks, dtype=torch.float32, device=device)
        work = Workspace(out, peaks, sums, counters(self.batch, device), self.num_tiles, self.splits)
        arguments, case, overlap = (*self._inputs(), work), self._case(), overlapping(device, self.tuning)
        warps = self.tuning.loop_warps if self.tiles > 2 else self.tuning.few_warps
        sum_kernel[(self.batch, self.splits, self.parts)](*arguments, CASE=case, **overlap, num_warps=warps)
        if self.rule != GREEDY_RULE.value and not self.last_draws:
            pick_kernel[(self.batch,)](*arguments, CASE=case, **overlap, num_warps=self.tuning.pick_warps)
        return out

    def _inputs(self) -> tuple[Any, ...]:
        target, drawn, keys = self.target, self.drawn, self.keys
        uniforms = keys.seed if self.uniforms is None else self.uniforms
        return (
            target.argument,
            drawn.argument,
            *target.counts,
            *drawn.counts,
            self._draft_tensors(),
            self.summaries,
            self.summaries.chunks,
            self.batch * target.positions,
            KeyRows(keys.seed, keys.request_id, keys.round, uniforms),
            self.bounds,
        )

    def _draft_tensors(self) -> DraftTensors:
        proposal, lengths, tokens = self.proposal, self.draft.lengths, self.draft.tokens
        points, sparse = lengths if proposal.points is None else proposal.points, proposal.sparse
        ids, probs = (lengths, lengths) if sparse is None else (sparse.ids.contiguous(), sparse.probs.contiguous())
        return DraftTensors(
            tokens,
            tokens.stride(0),
            lengths,
            kept=lengths if proposal.kept is None else proposal.kept,
            places=lengths if proposal.places is None else proposal.places,
            points=points,
            points_stride=points.stride(0),
            is_point=lengths if proposal.is_point is None else proposal.is_point,
            sparse_ids=ids,
            sparse_probs=probs,
            num_sparse=0 if sparse is None else ids.shape[-1],
            sparse_positions=1 if sparse is None else ids.shape[1],
        )

    def _case(self) -> Case:
        return Case(
            CHUNKS=triton.next_power_of_2(self.summaries.chunks) if self.summed else 1,
            POSITIONS=1 if self.positions == 1 else max(FEW_POSITIONS, triton.next_power_of_2(self.positions)),
            ALL=triton.next_power_of_2(self.num_tiles),
            TILES=self.tiles,
            LOOPS=self.loops,
            KIND=self.proposal.kind,
            RULE=self.rule,
            KEPT=self.proposal.kept is not None,
            REDUCED=self.proposal.places is not None,
            SCALED=self.scaled,
            CUT=self.is_cut,
            GREEDY=self.greedy,
            SUMMED=self.summed,
            GIVEN=self.uniforms is not None,
            LAST=self.last_draws,
        )
