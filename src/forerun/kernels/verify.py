"""Verification in Triton, from logits to tokens. The reference is `math.verify`; the same keys give the same tokens.

Launches for the token rule: the pass over the target's rows (`summary`, and thresholds where something is cut), then
`sum_kernel`, in which every program works out how much of the draft is kept and sums a part of what the next token is
drawn from; up to 32768 tokens one program sums all and draws, beyond that `pick_kernel` draws. q is read at the refused
position only, if the drafter kept its summaries. The block rule needs what is left at *every* position, so it reads all
rows of both. Nothing waits for the host, and keys are read from device memory: a captured graph draws anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.judge import (
    BLOCK_RULE,
    GREEDY_RULE,
    KEPT_WIDTH,
    LOGITS,
    MIXED,
    NO_DRAFT,
    NOBODY,
    POINTS,
    SIGMOID,
    SPARSE,
    TOKEN,
    at,
    block_count,
    block_weights,
    count_kept,
    draft_side,
    left_over,
    target_side,
)
from forerun.kernels.law import NEGATIVE, TILE, log_probability, pick, pick_goal, probability, warped
from forerun.kernels.philox import FINAL, uniform
from forerun.kernels.summary import Logits, Summaries, summarise
from forerun.kernels.tuning import TUNING, Tuning
from forerun.math.laws import LogitLaw, MixedLaw, PointMass, ReducedLaw, SparseLaw
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Keys, Law, Rule, Verdict

HEAD = tl.constexpr(3)  # entries of a result before the log-probabilities
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RULES = {Rule.TOKEN: TOKEN, Rule.BLOCK: BLOCK_RULE}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft's law as the tensors kernels read; what its kind does not have is any tensor at all, never read."""

    kind: int
    logits: Logits | None = None
    kept: Tensor | None = None  # [N, 5] float32, see math.laws.KEPT
    places: Tensor | None = None  # [V] int32
    points: Tensor | None = None  # [B, K] int64
    is_point: Tensor | None = None  # [B] bool
    sparse: SparseLaw | None = None


def proposal_of(law: Law) -> Proposal | None:
    """None for laws of a kind that no kernel reads."""
    if isinstance(law, LogitLaw):
        good = law.logits.dtype in DTYPES and law.logits.stride(-1) == 1
        return Proposal(LOGITS.value, _logits(law), law.kept) if good else None
    if isinstance(law, ReducedLaw):
        inner = proposal_of(law.law)
        good = inner is not None and inner.kind == LOGITS.value and inner.places is None
        return replace(inner, places=law.places) if good and inner is not None else None
    if isinstance(law, PointMass):
        return Proposal(POINTS.value, points=law.tokens)
    if isinstance(law, SparseLaw):
        return Proposal(SPARSE.value, sparse=law) if law.probs.dtype == torch.float32 else None
    return _mixed(law) if isinstance(law, MixedLaw) else None


def _mixed(law: MixedLaw) -> Proposal | None:
    """Rows that copy beside rows that draw."""
    parts = [proposal_of(each) for each in law.laws]
    kinds = [None if part is None else part.kind for part in parts]
    if sorted(kinds, key=str) != [LOGITS.value, POINTS.value]:
        return None
    drawn, copied = parts[kinds.index(LOGITS.value)], parts[kinds.index(POINTS.value)]
    assert drawn is not None and copied is not None
    is_point = law.choice == kinds.index(POINTS.value)
    return replace(drawn, kind=MIXED.value, points=copied.points, is_point=is_point)


def _logits(law: LogitLaw) -> Logits:
    return Logits(law.logits, law.index, law.params)


def supports(target: Law, draft: Draft, rule: Any, all_greedy: bool = False) -> bool:
    """Whether these kernels can judge this; the reference judges everything."""
    if not isinstance(target, LogitLaw) or target.logits.dtype not in DTYPES or target.logits.stride(-1) != 1:
        return False
    proposal = proposal_of(draft.law) if draft.width else Proposal(NO_DRAFT.value)
    if proposal is None or not len(draft.lengths):
        return False
    if all_greedy or rule in RULES:
        return True
    repaired = isinstance(rule, Sigmoid) and not rule.as_published
    return repaired and proposal.kind in (NO_DRAFT.value, LOGITS.value) and not _any_greedy(target, proposal)


def _any_greedy(target: LogitLaw, proposal: Proposal) -> bool:
    return target.params.any_greedy or (proposal.logits is not None and proposal.logits.params.any_greedy)


def verify(
    target: LogitLaw, draft: Draft, rule: Any, keys: Keys, all_greedy: bool = False, tuning: Tuning = TUNING
) -> Verdict:
    """`math.verify.verify` for what `supports` allows. All fields are views of one small tensor."""
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
    assert proposal is not None, "ask `supports` first"
    code = GREEDY_RULE if all_greedy else RULES.get(rule, SIGMOID)
    bounds = (rule.alpha, rule.beta) if isinstance(rule, Sigmoid) else (0.0, 1.0)
    job = Job(_logits(target), draft, proposal, code.value, keys, tuning, bounds=bounds)
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
        self.num_tiles = triton.cdiv(target.vocab, TILE.value)
        self.is_cut = target.is_cut or (proposal.logits is not None and proposal.logits.is_cut)
        self.scaled = target.params.any_scaled or self.drawn.params.any_scaled
        self.greedy = target.params.any_greedy or self.drawn.params.any_greedy
        self.summed = rule != SIGMOID.value or self.is_cut
        self.summaries: Summaries | None = None

    def run(self) -> Tensor:
        """Two launches, or three; one more where something is cut."""
        device = self.target.logits.device
        out = torch.empty(self.batch, HEAD.value + self.positions, dtype=torch.int64, device=device)
        self.summaries = self._summaries()
        if self.rule == GREEDY_RULE.value:
            self._sum(out, 1, True, 1, (self.batch, 1))
            return out
        padded = triton.next_power_of_2(self.num_tiles)
        tiles = padded if padded * TILE.value <= self.tuning.single else min(self.tuning.tiles, padded)
        splits = triton.cdiv(self.num_tiles, tiles)
        if self.rule == BLOCK_RULE.value:
            sums = self._sum(out, tiles, False, splits, (self.batch, splits, self.positions))
        else:
            sums = self._sum(out, tiles, splits == 1, splits, (self.batch, splits))
        if self.rule == BLOCK_RULE.value or splits > 1:
            pick_kernel[(self.batch,)](
                *self._inputs(), out, *sums, self.num_tiles, splits,
                TILES=padded, SPLIT=tiles, **self._options(), num_warps=self.tuning.pick_warps,
            )  # fmt: skip
        return out

    def _summaries(self) -> Summaries:
        if not self.summed:  # any tensors: nothing of them is read
            logits = self.target.logits
            return Summaries(logits[:1], logits[:1], logits[:1], logits[:1])
        every = self.proposal.logits if self.proposal.kept is None else None
        return summarise(self.target, self.draft.lengths, every, self.tuning)

    def _sum(self, out: Tensor, tiles: int, single: bool, splits: int, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        device = out.device
        positions = self.positions if self.rule == BLOCK_RULE.value else 1
        sums = torch.empty(0 if single else self.batch * positions * self.num_tiles, dtype=torch.float64, device=device)
        peaks = torch.empty(0 if self.summed else self.batch * splits, dtype=torch.float32, device=device)
        warps = self.tuning.single_warps if tiles > self.tuning.tiles else self.tuning.sum_warps
        sum_kernel[grid](
            *self._inputs(), out, peaks, sums, self.num_tiles, splits,
            TILES=tiles, SINGLE=single, **self._options(), num_warps=warps,
        )  # fmt: skip
        return peaks, sums

    def _inputs(self) -> list[Any]:
        target, drawn, proposal, sums = self.target, self.drawn, self.proposal, self.summaries
        assert sums is not None
        lengths, tokens, sparse = self.draft.lengths, self.draft.tokens, proposal.sparse
        points = lengths if proposal.points is None else proposal.points
        ids, probs = (lengths, lengths) if sparse is None else (sparse.ids.contiguous(), sparse.probs.contiguous())
        keys = self.keys
        return [
            target.logits, target.index, target.params.temperature,
            target.logits.stride(0), target.index.stride(0), target.vocab,
            tokens, tokens.stride(0), lengths,
            drawn.logits, drawn.index, drawn.params.temperature,
            drawn.logits.stride(0), drawn.index.stride(0), drawn.vocab,
            lengths if proposal.kept is None else proposal.kept,
            lengths if proposal.places is None else proposal.places,
            points, points.stride(0),
            lengths if proposal.is_point is None else proposal.is_point,
            ids, probs, ids.shape[-1], 1 if sparse is None else ids.shape[1],
            sums.peak, sums.mass, sums.threshold, sums.best, sums.chunks,
            target.positions, self.batch * target.positions, drawn.positions,
            keys.seed, keys.request_id, keys.round, keys.seed if self.uniforms is None else self.uniforms,
            *self.bounds,
        ]  # fmt: skip

    def _options(self) -> dict[str, Any]:
        assert self.summaries is not None
        return {
            "CHUNKS": triton.next_power_of_2(self.summaries.chunks) if self.summed else 1,
            "KP": triton.next_power_of_2(self.positions),
            "KIND": self.proposal.kind,
            "RULE": self.rule,
            "KEPT": self.proposal.kept is not None,
            "REDUCED": self.proposal.places is not None,
            "SCALED": self.scaled,
            "CUT": self.is_cut,
            "GREEDY": self.greedy,
            "SUMMED": self.summed,
            "GIVEN": self.uniforms is not None,
        }


@triton.jit
def sum_kernel(
    # the target
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
    # the draft
    tokens, tokens_stride, lengths, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
    points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
    # the summaries
    peaks, masses, thresholds, bests, num_chunks, positions, q_start, q_positions,
    # the rest
    seed, request_id, round_, uniforms, alpha, beta,
    out,  # [B, 3 + P] int64: kept tokens, next token, finite, log-probabilities of what is emitted (float64 bits)
    split_peaks,  # [B, S] float32, the sigmoid rule's
    sums,  # [B, P or 1, T] float64, of tiles
    num_tiles, num_splits,
    CHUNKS: tl.constexpr, KP: tl.constexpr, TILES: tl.constexpr, SINGLE: tl.constexpr, KIND: tl.constexpr,
    RULE: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """One program a row and range of tiles: judge the draft, then sum what the next token is drawn from."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, KP)
    length = tl.load(lengths + b)
    token = tl.load(tokens + b * tokens_stride + i, mask=i < length, other=0)
    p_row, log_p, peak, shift, divisor, log_mass, threshold, best = target_side(
        b, i, length, token, p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
        peaks, masses, thresholds, bests, num_chunks, positions, CHUNKS, RULE, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    q_row, log_q, q_shift, q_divisor, q_log_mass, q_threshold, q_best, point, pointed = draft_side(
        b, i, length, token, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
        points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
        peaks, masses, thresholds, bests, num_chunks, q_start, q_positions,
        CHUNKS, KIND, RULE, KEPT, REDUCED, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    finite = tl.min(tl.where(i <= length, (peak - peak == 0).to(tl.int32), 1), axis=0)
    key, request, turn = tl.load(seed + b), tl.load(request_id + b), tl.load(round_ + b)
    weight = tl.full((), 1.0, tl.float64)
    if RULE == GREEDY_RULE:
        n = tl.min(tl.where((log_p == 0.0) & (i < length), NOBODY, i), axis=0)
    elif RULE == BLOCK_RULE:
        n = tl.program_id(2)  # sums are wanted at every position
        weight = at(block_weights(i, length, log_p, log_q, KP), i, n)
    else:
        n = count_kept(i, length, log_p, log_q, key, request, turn, alpha, beta, RULE)
    if RULE != BLOCK_RULE:
        if s == 0:
            shown = log_p
            if not SUMMED:
                shown = tl.full(log_p.shape, float("nan"), tl.float32)
            store_head(b, i, n, finite, shown, out, positions)
    if RULE == GREEDY_RULE:
        tl.store(out + b * (HEAD + positions) + 1, at(best, i, n).to(tl.int64))
        tl.store(out + b * (HEAD + positions) + HEAD + n, tl.full((), 0, tl.int64))
    elif n <= length:
        refused = n < length
        p_start, q_start_row = p_logits + at(p_row, i, n) * p_stride, q_logits + at(q_row, i, n) * q_stride
        sparse = (b * sparse_positions + n) * num_sparse
        shift_n, threshold_n, best_n = at(shift, i, n), at(threshold, i, n), at(best, i, n)
        q_shift_n, q_log_mass_n, q_threshold_n = at(q_shift, i, n), at(q_log_mass, i, n), at(q_threshold, i, n)
        q_best_n, point_n = at(q_best, i, n), at(point, i, n)
        tile = s * TILES + tl.arange(0, TILES)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inside = column < p_vocab
        x = tl.load(p_start + column, mask=inside, other=NEGATIVE).to(tl.float32)
        w = warped(x, shift_n, divisor, SCALED)
        if SUMMED:
            log_mass_n = at(log_mass, i, n)
        else:  # the sigmoid rule's bonus: relative to this program's own peak
            log_mass_n = tl.max(tl.max(tl.where(w == w, w, NEGATIVE), axis=1), axis=0)
        value = left_over(
            column, inside, x, w, divisor, log_mass_n, threshold_n, best_n, refused,
            q_start_row, q_shift_n, q_divisor, q_log_mass_n, q_threshold_n, q_best_n, q_vocab, places,
            point_n, pointed, sparse_ids + sparse, sparse_probs + sparse, num_sparse, weight, alpha, beta,
            KIND, RULE, REDUCED, SCALED, CUT, GREEDY,
        )  # fmt: skip
        sum_ = tl.sum(value.to(tl.float64), axis=1)
        if SINGLE:
            if GIVEN:
                u = tl.load(uniforms + b)
            else:
                u = uniform(key, request, turn, n.to(tl.int64), FINAL)
            finish(
                b, n, u, sum_, refused, p_start, shift_n, divisor, log_mass_n, threshold_n, best_n, p_vocab,
                q_start_row, q_shift_n, q_divisor, q_log_mass_n, q_threshold_n, q_best_n, q_vocab, places,
                point_n, pointed, sparse_ids + sparse, sparse_probs + sparse, num_sparse, weight, alpha, beta,
                out, kept, positions, KIND, RULE, REDUCED, SCALED, CUT, GREEDY, SUMMED, GIVEN,
            )  # fmt: skip
        else:
            if RULE == BLOCK_RULE:
                place = (b * positions + n) * num_tiles
            else:
                place = b * num_tiles
            tl.store(sums + place + tile, sum_, mask=tile < num_tiles)
            if not SUMMED:
                tl.store(split_peaks + b * num_splits + s, log_mass_n)


@triton.jit
def pick_kernel(
    p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
    tokens, tokens_stride, lengths, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
    points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
    peaks, masses, thresholds, bests, num_chunks, positions, q_start, q_positions,
    seed, request_id, round_, uniforms, alpha, beta,
    out, split_peaks, sums, num_tiles, num_splits,
    CHUNKS: tl.constexpr, KP: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    RULE: tl.constexpr, KEPT: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """One program a row: from the tiles' sums to the token. TILES covers all, SPLIT is how many a program summed."""
    b = tl.program_id(0).to(tl.int64)
    i, tile = tl.arange(0, KP), tl.arange(0, TILES)
    length = tl.load(lengths + b)
    token = tl.load(tokens + b * tokens_stride + i, mask=i < length, other=0)
    p_row, log_p, peak, shift, divisor, log_mass, threshold, best = target_side(
        b, i, length, token, p_logits, p_index, p_temperature, p_stride, p_index_stride, p_vocab,
        peaks, masses, thresholds, bests, num_chunks, positions, CHUNKS, RULE, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    q_row, log_q, q_shift, q_divisor, q_log_mass, q_threshold, q_best, point, pointed = draft_side(
        b, i, length, token, q_logits, q_index, q_temperature, q_stride, q_index_stride, q_vocab, kept, places,
        points, points_stride, is_point, sparse_ids, sparse_probs, num_sparse, sparse_positions,
        peaks, masses, thresholds, bests, num_chunks, q_start, q_positions,
        CHUNKS, KIND, RULE, KEPT, REDUCED, SCALED, CUT, GREEDY, SUMMED,
    )  # fmt: skip
    key, request, turn = tl.load(seed + b), tl.load(request_id + b), tl.load(round_ + b)
    weight = tl.full((), 1.0, tl.float64)
    if RULE == BLOCK_RULE:
        place = (b * positions + i[:, None]) * num_tiles + tile[None, :]
        there = (i <= length)[:, None] & (tile < num_tiles)[None, :]
        every = tl.load(sums + place, mask=there, other=0.0)
        weights = block_weights(i, length, log_p, log_q, KP)
        n = block_count(i, length, weights, tl.sum(every, axis=1), key, request, turn)
        weight = at(weights, i, n)
        sum_ = tl.sum(tl.where((i == n)[:, None], every, 0.0), axis=0)
        finite = tl.min(tl.where(i <= length, (peak - peak == 0).to(tl.int32), 1), axis=0)
        store_head(b, i, n, finite, log_p, out, positions)
    else:
        n = tl.load(out + b * (HEAD + positions)).to(tl.int32)
        sum_ = tl.load(sums + b * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    refused = n < length
    shift, log_mass, threshold, best = at(shift, i, n), at(log_mass, i, n), at(threshold, i, n), at(best, i, n)
    if not SUMMED:
        local = tl.load(split_peaks + b * num_splits + tile // SPLIT, mask=tile < num_tiles, other=NEGATIVE)
        log_mass = tl.max(local, axis=0)
        sum_ = tl.where(refused, sum_, sum_ * tl.exp((local - log_mass).to(tl.float64)))
    if GIVEN:
        u = tl.load(uniforms + b)
    else:
        u = uniform(key, request, turn, n.to(tl.int64), FINAL)
    sparse = (b * sparse_positions + n) * num_sparse
    finish(
        b, n, u, sum_, refused, p_logits + at(p_row, i, n) * p_stride, shift, divisor, log_mass, threshold, best,
        p_vocab, q_logits + at(q_row, i, n) * q_stride, at(q_shift, i, n), q_divisor, at(q_log_mass, i, n),
        at(q_threshold, i, n), at(q_best, i, n), q_vocab, places, at(point, i, n), pointed, sparse_ids + sparse,
        sparse_probs + sparse, num_sparse, weight, alpha, beta,
        out, kept, positions, KIND, RULE, REDUCED, SCALED, CUT, GREEDY, SUMMED, GIVEN,
    )  # fmt: skip


@triton.jit
def store_head(b, i, n, finite, log_p, out, positions):
    """All of the result but the next token."""
    head = out + b * (HEAD + positions)
    bits = tl.where(i < n, log_p, 0.0).to(tl.float64).to(tl.int64, bitcast=True)
    tl.store(head + HEAD + i, bits, mask=(i < positions) & (i != n))
    tl.store(head, n.to(tl.int64))
    tl.store(head + 2, finite.to(tl.int64))


@triton.jit
def finish(
    b, n, u, sums, refused, p_row, shift, divisor, log_mass, threshold, best, vocab,
    q_row, q_shift, q_divisor, q_log_mass, q_threshold, q_best, q_vocab, places,
    point, is_point, sparse_ids, sparse_probs, num_sparse, weight, alpha, beta, out, kept, positions,
    KIND: tl.constexpr, RULE: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr, SUMMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Draw: the tile from the sums, then the token inside it. Where rounding left nothing after a refusal, from p."""
    tile, rest, total = pick(sums, u)
    nothing = refused & (total <= 0.0)
    if nothing:
        tile, rest = _pick_tile(p_row, u, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
    refused = refused & (total > 0.0)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab
    x = tl.load(p_row + column, mask=inside, other=NEGATIVE).to(tl.float32)
    w = warped(x, shift, divisor, SCALED)
    value = left_over(
        column, inside, x, w, divisor, log_mass, threshold, best, refused,
        q_row, q_shift, q_divisor, q_log_mass, q_threshold, q_best, q_vocab, places,
        point, is_point, sparse_ids, sparse_probs, num_sparse, weight, alpha, beta,
        KIND, RULE, REDUCED, SCALED, CUT, GREEDY,
    )  # fmt: skip
    entry, _ = pick_goal(value.to(tl.float64), rest)
    log_p = log_probability(w, column, log_mass, threshold, best, CUT, GREEDY).to(tl.float64)
    log_p = tl.sum(tl.where(tl.arange(0, TILE) == entry, log_p, 0.0), axis=0)
    head = out + b * (HEAD + positions)
    if not SUMMED:
        log_p = tl.where(refused, float("nan"), log_p - tl.log(total))
        tl.store(head + 2, (total - total == 0).to(tl.int64))
    tl.store(head + 1, (tile * TILE + entry).to(tl.int64))
    tl.store(head + HEAD + n, log_p.to(tl.int64, bitcast=True))
    if GIVEN:  # a draft's own draw: what its verification needs of the row
        own = kept + b * KEPT_WIDTH
        tl.store(own, shift)
        tl.store(own + 1, log_mass)
        tl.store(own + 2, threshold)
        tl.store(own + 3, best.to(tl.float32))
        tl.store(own + 4, log_p.to(tl.float32))


@triton.jit
def _pick_tile(
    row, u, shift, divisor, log_mass, threshold, best, vocab, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """The tile of p in which u falls, one tile after the other: as good as never needed."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        total += _tile_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
    goal, before = u * total, tl.full((), 0.0, tl.float64)
    tile, rest = tl.full((), 0, tl.int32), goal
    for start in range(0, vocab, TILE):
        own = _tile_sum(row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED, CUT, GREEDY)
        here = (own > 0) & (before <= goal)
        tile, rest = tl.where(here, start // TILE, tile), tl.where(here, goal - before, rest)
        before += own
    return tile, rest


@triton.jit
def _tile_sum(
    row, start, shift, divisor, log_mass, threshold, best, vocab, SCALED: tl.constexpr, CUT: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, TILE)
    x = tl.load(row + column, mask=column < vocab, other=NEGATIVE).to(tl.float32)
    p = probability(warped(x, shift, divisor, SCALED), column, log_mass, threshold, best, CUT, GREEDY)
    return tl.sum(tl.where(column < vocab, p, 0.0).to(tl.float64), axis=0)
