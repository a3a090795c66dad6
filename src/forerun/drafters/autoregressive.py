"""Drafters that say what may follow several guesses at once, and the chains that are drawn with them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import ops
from forerun.arguments import number
from forerun.drafters.base import Drafter, empty_draft
from forerun.math.laws import LogitLaw, PointMass, ReducedLaw, most_likely
from forerun.math.precision import working
from forerun.models.scorer import Scorer
from forerun.types import Adjuster, Draft, DraftContext, Law

if TYPE_CHECKING:
    from forerun.drafters.device import DeviceLevels

ScoreLast = Callable[[Sequence[int], Sequence[Sequence[int]]], Tensor]  # as `Scorer.score_last`


class Steps(Protocol):
    """One draft under way. Rows are entries of the batch; each has a tree of guesses that were looked behind.

    `close` drops whatever was built on guesses.
    """

    context: DraftContext  # as asked, but with no more room than there is
    ids: Tensor | None  # [Vd] ascending: the tokens the logits are of; None for the target's vocabulary

    def roots(self, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), V] after each row's history."""
        ...

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        """Logits [N, V] behind more guesses, row by row.

        `parents[i]` counts the guesses that row `rows[i]` was asked about before, in order; -1 is its history.
        """
        ...

    def close(self) -> None: ...


class BranchingDrafter(Drafter):
    """A drafter that can be asked about several guesses at once: chains are drawn and a `Tree` is grown with it."""

    stop_below: float | None = None
    """End a row's draft after a token that the draft gave less than this probability."""

    @abstractmethod
    def steps(self, context: DraftContext) -> Steps:
        """Begin a draft."""

    def propose(self, context: DraftContext) -> Draft:
        steps = self.steps(context)
        try:
            return grow_chain(steps, self.stop_below)
        finally:
            steps.close()

    def device_levels(self) -> DeviceLevels | None:
        """Its trees inside rounds that a GPU runs by itself; None: on the host alone."""
        return None


class ModelSteps:
    """With a causal model; `unseen[b]` is the text it has not taken in, and `close` is called at the end.

    `score_last` replaces the scorer's own for a chain, where an engine has recorded it.
    """

    def __init__(
        self,
        scorer: Scorer,
        context: DraftContext,
        unseen: Sequence[Sequence[int]],
        ids: Tensor | None,
        close: Callable[[], None],
        score_last: ScoreLast | None = None,
    ) -> None:
        self.scorer, self.context, self.ids, self.close = scorer, context, ids, close
        self.unseen, self.score_last = unseen, score_last
        self._parents: list[list[int]] = [[] for _ in context.rows]

    def roots(self, rows: Sequence[int]) -> Tensor:
        score = self.score_last or self.scorer.score_last
        return self._fitted(score([self.context.rows[b] for b in rows], [self.unseen[b] for b in rows]))

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        numbers = [self.context.rows[b] for b in rows]
        if self.score_last is not None:
            return self._fitted(self.score_last(numbers, tokens))
        for b, more in zip(rows, parents, strict=True):
            self._parents[b] += more
        return self._fitted(self.scorer.score(numbers, tokens, trees=[self._parents[b] for b in rows]))

    def _fitted(self, logits: Tensor) -> Tensor:
        return fitted(logits, self.context.vocab_size) if self.ids is None else logits


@dataclass(slots=True)
class _DraftInProgress:
    """A draft under construction: tokens by row, logits (where something is drawn from them) in order of computing."""

    tokens: list[list[int]]
    places: list[list[int]]  # places[b][i]: which row of the stacked logits gave token i of row b
    owners: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # summaries of those logits' rows, where a kernel made them

    def append(self, wanting: Sequence[int], drawn: Sequence[int], logits: Tensor | None, kept: Tensor | None) -> None:
        start = len(self.owners)
        self.owners.extend(wanting)
        for place, (b, token) in enumerate(zip(wanting, drawn, strict=True), start):
            self.tokens[b].append(token)
            self.places[b].append(place)
        if logits is not None:
            self.logits.append(logits)
        if kept is not None:
            self.kept.append(kept)

    def finish(self, context: DraftContext, ids: Tensor | None) -> Draft:
        lengths = torch.tensor([len(row) for row in self.tokens], device=context.device)
        tokens = rectangle(self.tokens, context.device)
        return Draft(tokens, lengths, self._law(context, ids, tokens))

    def _law(self, context: DraftContext, ids: Tensor | None, tokens: Tensor) -> Law:
        if not self.logits:
            return PointMass(tokens, context.vocab_size)
        owner = torch.tensor(self.owners, dtype=torch.long, device=context.device)
        index = rectangle(self.places, context.device)
        kept = torch.cat(self.kept) if len(self.kept) == len(self.logits) else None
        law = LogitLaw(torch.cat(self.logits), index, context.params, owner, kept=kept)
        return law if ids is None else ReducedLaw(law, ids, context.vocab_size)


def grow_chain(steps: Steps, stop_below: float | None = None) -> Draft:
    """Sample up to `max_lengths` tokens a row, one after the other, for all rows that still want one.

    `stop_below` ends a row's draft after a token the draft itself gave less than that probability. The token is kept: a
    rule that looked at a token and then dropped it would bend the law.
    """
    context, ids = steps.context, steps.ids
    if not any(context.max_lengths):
        return empty_draft(len(context.rows), context.vocab_size, context.device)
    draft = _DraftInProgress([[] for _ in context.rows], [[] for _ in context.rows])
    wanting = [b for b, room in enumerate(context.max_lengths) if room > 0]
    logits = steps.roots(wanting)
    for position in range(max(context.max_lengths)):
        logits = _adjusted(logits, context, wanting, draft, ids)
        members = torch.tensor(wanting, device=context.device)
        places, sure, kept = _draw(logits, context, members, position, stop_below)
        tokens: list[int] = (places if ids is None else ids[places]).tolist()
        draft.append(wanting, tokens, None if context.params.all_greedy else logits, kept)
        going = [True] * len(wanting) if sure is None else sure.tolist()
        left = [
            (b, token)
            for b, token, go in zip(wanting, tokens, going, strict=True)
            if go and position + 1 < context.max_lengths[b]
        ]
        if not left:
            break
        wanting = [b for b, _ in left]
        logits = steps.behind(wanting, [[token] for _, token in left], [[position - 1]] * len(left))
    return draft.finish(context, ids)


def check_stop_below(stop_below: float | None) -> None:
    if stop_below is not None:
        number("stop_below", stop_below, lambda x: 0 <= x < 1, "must be in [0, 1); None never stops early")


def _draw(
    logits: Tensor, context: DraftContext, members: Tensor, position: int, stop_below: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A place [M] in each row of logits, whether the draft found it likely enough to go on, and the rows' summaries."""
    if context.params.all_greedy:
        places = most_likely(logits)
        return places, None if stop_below is None else _plain_chances(logits, places) >= stop_below, None
    params = context.params.select(members)
    drawn = ops.sample(logits, params, context.uniforms[members, position], context.kernels)
    if stop_below is None:
        return drawn.tokens, None, drawn.kept
    chances = drawn.log_q.exp()
    if params.any_greedy:
        chances = torch.where(params.temperature > 0, chances, _plain_chances(logits, drawn.tokens))
    return drawn.tokens, chances >= stop_below, drawn.kept


def _plain_chances(logits: Tensor, places: Tensor) -> Tensor:
    """For greedy rows, whose own law finds everything certain."""
    return torch.softmax(working(logits), dim=-1).gather(1, places[:, None])[:, 0]


def _adjusted(
    logits: Tensor, context: DraftContext, wanting: Sequence[int], draft: _DraftInProgress, ids: Tensor | None
) -> Tensor:
    """The row's own penalties and processors: a draft that ignores them would only be rejected more often."""
    if not any(context.adjusters[b] for b in wanting):
        return logits
    rows = []
    for place, b in enumerate(wanting):
        adjust, row = context.adjusters[b], logits[place : place + 1]
        rows.append(row if adjust is None else adjusted_row(row, adjust, draft.tokens[b], ids, context.vocab_size))
    return torch.cat(rows)


def adjusted_row(row: Tensor, adjust: Adjuster, drafted: list[int], ids: Tensor | None, vocab_size: int) -> Tensor:
    """Adjusters speak of the whole vocabulary: what the draft cannot say is impossible to them."""
    if ids is None:
        return adjust(row, drafted, len(drafted))
    full = row.new_full((1, vocab_size), -torch.inf).index_copy_(1, ids, row)
    return adjust(full, drafted, len(drafted))[:, ids]


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Vocabularies that differ by padding: ids only one side has get no mass."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]


def rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device)
