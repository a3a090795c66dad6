"""Turning a verdict into emitted tokens: stops, budgets, origins, log-probabilities, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.engine.adjust import cause_of_failure
from forerun.engine.branching import Kept
from forerun.engine.host_draft import Guess
from forerun.engine.request import FinishReason
from forerun.engine.row import Progress, Row, TokenLogprob
from forerun.engine.stats import Seconds
from forerun.math.precision import working
from forerun.types import Origin, RoundOutcome, Verdict


@dataclass(slots=True)
class VerifiedRound:
    """A round that was drafted, scored and verified, on the host or on the device, and is still to be committed."""

    rows: list[Row]
    blocks: list[list[int]]  # each row's last token and its draft
    kept: list[Kept]  # what the verdict left of each draft
    verdict: Verdict
    scored: int  # positions the target scored, all rows together
    round_number: int  # of the view its lengths were asked with; 0 where there was none
    seconds: Seconds
    # Of the model's law there are logits [N, V], or log-probabilities of what each row emits, or nothing.
    logits: Tensor | None = None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    # A round without logits gives those [n, V] of one row and its block, for a message that says why the row failed.
    score_again: Callable[[Row, Sequence[int]], Tensor] | None = None
    trees: list[list[int]] | None = None  # each row's parents, where drafts are trees
    evidence: tuple[int, ...] | None = None
    predicted: tuple[bool, ...] | None = None  # rows whose draft is what their request predicts
    copied: tuple[bool, ...] | None = None  # rows whose draft was deterministic
    guesses: tuple[Guess | None, ...] | None = None  # how deterministic drafts began, kept by the policy or not
    wanted: tuple[int, ...] | None = None  # what the policy kept of them, where the round may not have had it
    idle_seconds: float | None = None  # how long the device had waited for the host
    steps: int | None = None  # of a round on the device: the draft length that all its rows were run with
    drawn: int = 0  # of a round on the device: tokens that were drafted there

    @property
    def on_device(self) -> bool:
        return self.steps is not None

    @property
    def spent(self) -> Seconds:
        """Its seconds; prompts that came along with the drafts take their share of the positions that were scored."""
        positions = sum(map(len, self.blocks))
        prompts = 0.0 if self.on_device else self.seconds.score * (1 - positions / self.scored)
        return self.seconds + Seconds(score=-prompts, prefill=prompts)


def commit(done: VerifiedRound) -> list[Progress]:
    """Give every row what it gained."""
    blocks, verdict, logits = done.blocks, done.verdict, done.logits
    following, finite = verdict.next_token.tolist(), verdict.finite.tolist()
    if verdict.tokens is not None:  # what is emitted is not what was drafted
        emitted = zip(blocks, verdict.tokens.tolist(), strict=True)
        blocks = [[block[0], *tokens[: len(block) - 1]] for block, tokens in emitted]
    start = 0
    progress = []
    for place, (row, block, kept) in enumerate(zip(done.rows, blocks, done.kept, strict=True)):
        scores: Tensor | list[TokenLogprob] | None = done.logprobs[place] if done.logprobs else None
        is_prediction = done.predicted is not None and done.predicted[place]
        # A view of a tensor costs more than all else here: it is made only for rows that read it.
        if logits is not None and row.request.logprobs is not None:
            scores = logits[start : start + len(block)]
        if finite[place] or _has_ended(row, block[1:], kept):
            progress.append(_commit_row(row, block[1:], kept, following[place], scores, is_prediction))
        else:
            seen = None if logits is None else logits[start : start + len(block)]
            if done.score_again is not None and row.adjuster is not None:
                seen = done.score_again(row, block)
            progress.append(_fail(row, kept, block[1:], seen, is_prediction))
        start += len(block)
    return progress


def outcome_of(done: VerifiedRound, progress: Sequence[Progress]) -> RoundOutcome:
    """What a policy is told of a round that was committed."""
    return RoundOutcome(
        rows=tuple(row.number for row in done.rows),
        request_ids=tuple(row.handle for row in done.rows),
        drafted=tuple(kept.depth for kept in done.kept),
        accepted=tuple(sum(origin is Origin.ACCEPTED for origin in gained.origins) for gained in progress),
        evidence=done.evidence,
        scored=done.scored,
        draft_seconds=done.seconds.draft,
        score_seconds=done.seconds.score,
        verify_seconds=done.seconds.verify,
        ended=tuple(gained.finish_reason is not None for gained in progress),
        copied=done.copied,
        nodes=tuple(len(block) - 1 for block in done.blocks),
        steps=done.steps,
        round_number=done.round_number,
        guessed=None if done.guesses is None else tuple(map(_came_true, done.guesses, progress)),
        wanted=done.wanted,
        idle_seconds=done.idle_seconds,
    )


def _came_true(guess: Guess | None, gained: Progress) -> tuple[int, bool] | None:
    """The evidence of a guess and whether it is the first token that a row gained; None where there is none of them."""
    return None if guess is None or not gained.tokens else (guess.evidence, gained.tokens[0] == guess.token)


def _commit_row(
    row: Row,
    drafted: list[int],
    draft: Kept,
    following: int,
    scores: Tensor | list[TokenLogprob] | None,
    is_prediction: bool,
) -> Progress:
    last = Origin.PLAIN if not draft.depth else Origin.BONUS if draft.whole else Origin.CORRECTION
    accepted = len(draft.nodes)
    tokens = [*(drafted[node] for node in draft.nodes), following]
    kept, row.finish_reason = row.stop.cut(row.output, tokens)
    tokens, origins = tokens[:kept], [*[Origin.ACCEPTED] * accepted, last][:kept]
    logprobs: list[TokenLogprob] = []
    if row.request.logprobs is not None and scores is not None:
        logprobs = (
            scores[:kept]
            if isinstance(scores, list)
            else _logprobs(scores, draft.scored_at[:kept], tokens, row.request.logprobs)
        )
        row.logprobs.extend(logprobs)
    row.gain(tokens, origins)
    row.counts = draft.depth, min(accepted, kept), kept, len(drafted), is_prediction
    row.round += 1
    return Progress(
        row.handle, row.request.request_id, tuple(tokens), tuple(origins), row.finish_reason, tuple(logprobs)
    )


def _has_ended(row: Row, drafted: list[int], draft: Kept) -> bool:
    """Whether a row ends with what it has kept of its draft: then the broken logits behind it are nobody's."""
    return row.stop.cut(row.output, [drafted[node] for node in draft.nodes])[1] is not None


def _fail(row: Row, draft: Kept, drafted: list[int], logits: Tensor | None, is_prediction: bool) -> Progress:
    """Logits that are not finite end this row alone. `logits` [n, V] are the target's, before adjustment."""
    cause = None
    if logits is not None:
        kept = [drafted[node] for node in draft.nodes]
        cause = cause_of_failure(row.request, row.output, kept, logits[draft.scored_at])
    row.finish_reason, after = FinishReason.ERROR, len(row.history) + len(draft.nodes)
    if cause is None:
        row.error = (
            f"the target returned NaN or infinite logits after {after} tokens; check the model's weights "
            "and dtype (float16 overflows where bfloat16 does not)"
        )
    else:
        row.error = (
            f"{cause} leaves no token to choose after {after} tokens: the target's logits are finite, and "
            "all -inf, +inf or NaN behind it; change that option"
        )
    row.counts = draft.depth, 0, 0, len(drafted), is_prediction
    return Progress(row.handle, row.request.request_id, (), (), row.finish_reason)


def _logprobs(scores: Tensor, places: list[int], tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Under the model's distribution before any sampling setting, so that they compare across settings."""
    laws = torch.log_softmax(working(scores[places]), dim=-1)
    values = laws[torch.arange(len(tokens)), torch.tensor(tokens, device=laws.device)].tolist()
    if not alternatives:
        return [TokenLogprob(token, value) for token, value in zip(tokens, values, strict=True)]
    best = laws.topk(min(alternatives, laws.shape[-1]), dim=-1)
    tops = [
        tuple(zip(ids, chances, strict=True))
        for ids, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprob(token, value, top) for token, value, top in zip(tokens, values, tops, strict=True)]
