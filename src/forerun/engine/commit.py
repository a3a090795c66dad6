"""Turning a verdict into emitted tokens: stops, budgets, origins, log-probabilities, counts."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.engine.adjust import cause_of_failure
from forerun.engine.branching import Kept
from forerun.engine.request import FinishReason
from forerun.engine.row import Progress, Row, TokenLogprob
from forerun.types import Origin, Verdict


def commit(
    batch: list[Row],
    blocks: list[list[int]],
    kept: list[Kept],
    verdict: Verdict,
    logits: Tensor | None,
    logprobs: list[list[float]] | None = None,
) -> list[Progress]:
    """Give every row what it gained.

    `blocks[b]` is the row's last token and its draft, `kept[b]` what the verdict left of it. Of the model's own law
    there are `logits` [N, V], or `logprobs` of what each row emits where nobody asks for more, or nothing.
    """
    following, finite = verdict.next_token.tolist(), verdict.finite.tolist()
    if verdict.tokens is not None:  # what is emitted is not what was drafted
        blocks = [
            [block[0], *own[: len(block) - 1]] for block, own in zip(blocks, verdict.tokens.tolist(), strict=True)
        ]
    start = 0
    progress = []
    for place, (row, block, draft) in enumerate(zip(batch, blocks, kept, strict=True)):
        token, good = following[place], finite[place]
        own: Tensor | list[float] | None = logprobs[place] if logprobs else None
        # A view of a tensor costs more than all else here: it is made for those who read it.
        if logits is not None and row.request.logprobs is not None:
            own = logits[start : start + len(block)]
        drafted = block[1:]
        if good:
            progress.append(_commit_row(row, drafted, draft, token, own))
        else:
            seen = None if logits is None else logits[start : start + len(block)]
            progress.append(_fail(row, draft.depth, drafted, seen))
        start += len(block)
    return progress


def _commit_row(
    row: Row, drafted: list[int], draft: Kept, following: int, own: Tensor | list[float] | None
) -> Progress:
    last = Origin.BONUS if draft.whole else Origin.CORRECTION
    accepted = len(draft.nodes)
    tokens = [*(drafted[node] for node in draft.nodes), following]
    kept, row.finish_reason = row.stop.cut(row.output, tokens)
    tokens, origins = tokens[:kept], [*[Origin.ACCEPTED] * accepted, last][:kept]
    if row.request.logprobs is not None and own is not None:
        row.logprobs.extend(_logprobs(own, draft.scored_at[:kept], tokens, row.request.logprobs))
    row.gain(tokens, origins)
    row.counts = draft.depth, min(accepted, kept), kept, len(drafted)
    row.round += 1
    return Progress(row.handle, row.request.request_id, tuple(tokens), tuple(origins), row.finish_reason)


def _fail(row: Row, depth: int, drafted: list[int], logits: Tensor | None) -> Progress:
    """Logits that are not numbers end the row and nobody else's. `logits` [n, V] are the target's own."""
    row.finish_reason = FinishReason.ERROR
    cause = None if logits is None else cause_of_failure(row.request, row.output, drafted, logits)
    if cause is None:
        row.error = (
            f"the target returned NaN or infinite logits after {len(row.history)} tokens; check the model's weights "
            "and dtype (float16 overflows where bfloat16 does not)"
        )
    else:
        row.error = (
            f"{cause} leaves no token to choose after {len(row.history)} tokens: the target's logits are finite, and "
            "all -inf, +inf or NaN behind it; change that option"
        )
    row.counts = depth, 0, 0, len(drafted)
    return Progress(row.handle, row.request.request_id, (), (), row.finish_reason)


def _logprobs(own: Tensor | list[float], places: list[int], tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Of the model's own distribution, so that they compare across sampling settings."""
    if isinstance(own, list):
        return [TokenLogprob(token, own[place]) for place, token in enumerate(tokens)]
    laws = torch.log_softmax(own[places].float(), dim=-1)
    values = laws[torch.arange(len(tokens)), torch.tensor(tokens, device=laws.device)].tolist()
    if not alternatives:
        return [TokenLogprob(token, value) for token, value in zip(tokens, values, strict=True)]
    best = laws.topk(min(alternatives, laws.shape[-1]), dim=-1)
    tops = [
        tuple(zip(ids, chances, strict=True))
        for ids, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprob(token, value, top) for token, value, top in zip(tokens, values, tops, strict=True)]
