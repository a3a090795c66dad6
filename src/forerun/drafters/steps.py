"""Drafters that can be asked about several guesses at once: what a tree is grown with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.drafters.autoregressive import fitted
from forerun.models.scorer import Scorer
from forerun.types import DraftContext, Drafter


class Steps(Protocol):
    """One draft under way. Rows are entries of the batch; each has a tree of guesses that have been looked behind.

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


@runtime_checkable
class CanBranch(Drafter, Protocol):
    """A drafter that trees can be grown with."""

    def steps(self, context: DraftContext) -> Steps:
        """Begin a draft."""
        ...


class ModelSteps:
    """With a causal model; `unseen[b]` is the text it has not taken in, and `close` is called at the end."""

    def __init__(
        self,
        scorer: Scorer,
        context: DraftContext,
        unseen: Sequence[Sequence[int]],
        ids: Tensor | None,
        close: Callable[[], None],
    ) -> None:
        self.scorer, self.context, self.ids, self.close = scorer, context, ids, close
        self.unseen = unseen
        self._parents: list[list[int]] = [[] for _ in context.rows]

    def roots(self, rows: Sequence[int]) -> Tensor:
        numbers, blocks = [self.context.rows[b] for b in rows], [self.unseen[b] for b in rows]
        self.scorer.feed(numbers, [block[:-1] if len(block) > SHORT else () for block in blocks])
        ends = [block[-1:] if len(block) > SHORT else block for block in blocks]
        return self._fitted(self.scorer.score_last(numbers, ends))

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        for b, more in zip(rows, parents, strict=True):
            self._parents[b] += more
        numbers, trees = [self.context.rows[b] for b in rows], [self._parents[b] for b in rows]
        return self._fitted(self.scorer.score(numbers, tokens, trees=trees))

    def _fitted(self, logits: Tensor) -> Tensor:
        return fitted(logits, self.context.vocab_size) if self.ids is None else logits


SHORT = 32  # text of at most so many tokens is taken in by the pass that answers
