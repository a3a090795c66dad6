"""Drafting with a causal model, one token a step, for all rows that still want one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import ops
from forerun.drafters.silence import silent
from forerun.math.laws import LogitLaw, warp
from forerun.models.scorer import Scorer
from forerun.types import Draft, DraftContext


@dataclass(slots=True)
class _Growing:
    """A draft under construction: tokens by row, logits in the order they were computed."""

    tokens: list[list[int]]
    places: list[list[int]]  # places[b][i]: which row of the stacked logits gave token i of row b
    owners: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def finish(self, context: DraftContext) -> Draft:
        lengths = torch.tensor([len(row) for row in self.tokens], device=context.device)
        tokens, index = (_rectangle(rows, context.device) for rows in (self.tokens, self.places))
        owner = torch.tensor(self.owners, dtype=torch.long, device=context.device)
        stacked = torch.cat(self.logits)
        law = LogitLaw(stacked, index, context.params, owner, vocab_size=context.vocab_size)
        return Draft(tokens, lengths, law)


def draft_with(
    scorer: Scorer, context: DraftContext, blocks: Sequence[Sequence[int]], stop_below: float | None = None
) -> Draft:
    """Sample up to `max_lengths` tokens a row; `blocks[b]` are the tokens the scorer has not seen yet.

    `stop_below` ends a row's draft after a token the draft itself gave less than that probability. The token is kept: a
    rule that looked at a token and then dropped it would bend the law.
    """
    if not any(context.max_lengths):
        return silent(len(context.rows), context.vocab_size, context.device)
    growing = _Growing([[] for _ in context.rows], [[] for _ in context.rows])
    wanting = [b for b, room in enumerate(context.max_lengths) if room > 0]
    feed = [list(blocks[b]) for b in wanting]
    for step in range(max(context.max_lengths)):
        logits = scorer.score_last([context.rows[b] for b in wanting], feed)
        logits = _adjusted(_fitted(logits, context.vocab_size), context, wanting, growing)
        members = torch.tensor(wanting, device=context.device)
        weights = torch.softmax(warp(logits, context.params.select(members)), dim=-1)
        drawn = ops.draw(weights, context.uniforms[members, step])
        sure = None if stop_below is None else weights.gather(1, drawn[:, None])[:, 0] >= stop_below
        _append(growing, wanting, logits, drawn.tolist())
        going = [True] * len(wanting) if sure is None else sure.tolist()
        wanting = [b for b, go in zip(wanting, going, strict=True) if go and step + 1 < context.max_lengths[b]]
        if not wanting:
            break
        feed = [growing.tokens[b][-1:] for b in wanting]
    return growing.finish(context)


def _append(growing: _Growing, wanting: Sequence[int], logits: Tensor, drawn: Sequence[int]) -> None:
    start = len(growing.owners)
    growing.logits.append(logits)
    growing.owners.extend(wanting)
    for place, (b, token) in enumerate(zip(wanting, drawn, strict=True), start):
        growing.tokens[b].append(token)
        growing.places[b].append(place)


def _adjusted(logits: Tensor, context: DraftContext, wanting: Sequence[int], growing: _Growing) -> Tensor:
    """The row's own penalties and processors: a draft that ignores them would only be rejected more often."""
    if not any(context.adjusters[b] for b in wanting):
        return logits
    rows = []
    for place, b in enumerate(wanting):
        adjust, drafted = context.adjusters[b], growing.tokens[b]
        row = logits[place : place + 1]
        rows.append(row if adjust is None else adjust(row, drafted, len(drafted)))
    return torch.cat(rows)


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Vocabularies that differ by padding: ids only one side has get no mass."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device)
