"""Verification in Triton, from logits to tokens. The reference is `math.verify`; the same keys give the same tokens.

Launches for the token rule: the pass over the target's rows (`summary`, and thresholds where something is cut), then
`sum_kernel`, in which every program works out how much of the draft is kept and sums a part of what the next token is
drawn from, and the last to finish draws. q is read at the refused position only, if the drafter kept its summaries.
The block rule needs what is left at *every* position, so it reads all rows of both. Nothing waits for the host, and
keys are read from device memory: a captured graph draws anew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from forerun.kernels.arguments import Case, DraftTensors, KeyRows, Summaries, Workspace
from forerun.kernels.counters import counters
from forerun.kernels.law import TILE
from forerun.kernels.truncate.summary import Logits, summarise
from forerun.kernels.tuning import TUNING, Tuning, overlapping
from forerun.kernels.verify.acceptance import BLOCK_RULE, GREEDY_RULE, LOGITS, NO_DRAFT, SIGMOID, TOKEN
from forerun.kernels.verify.draft_law import Proposal, logits_of, proposal_of, why_not_logits
from forerun.kernels.verify.draw import HEAD, pick_kernel, sum_kernel
from forerun.math.laws import LogitLaw
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Keys, Law, Rule, Verdict

RULES = {Rule.TOKEN: TOKEN, Rule.BLOCK: BLOCK_RULE}


def why_not(target: Law, draft: Draft, rule: Any, all_greedy: bool = False) -> str | None:
    """What these kernels do not cover, in words; None where they cover everything, as the reference does."""
    if not isinstance(target, LogitLaw):
        return f"a target law of type {type(target).__name__}"
    if reason := why_not_logits(target.logits):
        return reason
    proposal = proposal_of(draft.law) if draft.width else Proposal(NO_DRAFT.value)
    if proposal is None:
        return f"a draft law of type {type(draft.law).__name__}, or its numbers"
    if not len(draft.lengths):
        return "no rows"
    if all_greedy or rule in RULES:
        return None
    if not isinstance(rule, Sigmoid) or rule.as_published:
        return f"the rule {rule}"
    if proposal.kind not in (NO_DRAFT.value, LOGITS.value) or _any_greedy(target, proposal):
        return "the sigmoid rule with greedy rows, or with a draft that is not logits"
    return None


def _any_greedy(target: LogitLaw, proposal: Proposal) -> bool:
    return target.params.any_greedy or (proposal.logits is not None and proposal.logits.params.any_greedy)


def verify(
    target: LogitLaw, draft: Draft, rule: Any, keys: Keys, all_greedy: bool = False, tuning: Tuning = TUNING
) -> Verdict:
    """`math.verify.verify` where `why_not` has no objection. All fields are views of one small tensor."""
    packed = verify_packed(target, draft, rule, keys, all_greedy, tuning)
    return Verdict(
        packed[:, 0],
        packed[:, 1],
        packed.view(torch.bool)[:, 2 * packed.element_size()],
        logprobs=packed.view(torch.float64)[:, HEAD.value :],
    )


def verify_packed(
    target: LogitLaw, draft: Draft, rule: Any, keys: Keys, all_greedy: bool = False, tuning: Tuning = TUNING
) -> Tensor:
    """[B, 3 + K + 1] int64: kept tokens, next token, whether finite, and log-probabilities (the bits of float64).

    The sigmoid rule reads no row it need not: without truncation it knows no log-probability but the bonus's (the
    others are NaN), and finds broken logits only where it draws.
    """
    proposal = proposal_of(draft.law) if draft.width else Proposal(NO_DRAFT.value)
    assert proposal is not None, "ask `why_not` first"
    code = GREEDY_RULE if all_greedy else RULES.get(rule, SIGMOID)
    bounds = (rule.alpha, rule.beta) if isinstance(rule, Sigmoid) else (0.0, 1.0)
    job = Job(logits_of(target), draft, proposal, code.value, keys, tuning, bounds=bounds)
    return job.run()


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
        return summarise(self.target, self.draft.lengths, every, self.tuning)

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
            num_sparse=ids.shape[-1],
            sparse_positions=1 if sparse is None else ids.shape[1],
        )

    def _case(self) -> Case:
        return Case(
            CHUNKS=triton.next_power_of_2(self.summaries.chunks) if self.summed else 1,
            POSITIONS=triton.next_power_of_2(self.positions),
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
