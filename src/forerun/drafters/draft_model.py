"""A smaller model with the same tokenizer, the classic draft of Leviathan et al. and Chen et al."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from forerun.drafters.autoregressive import draft_with
from forerun.drafters.vocabulary import check_vocabularies
from forerun.errors import InvalidArgument
from forerun.math.attention import Form
from forerun.models.scorer import Scorer
from forerun.types import Draft, DraftContext


class DraftModel:
    """Drafts with `model`; keeps a ragged cache of its own that follows the rows.

    After a fully kept draft its cache is one key behind, and after rounds without drafts many: each draft begins by
    taking in whatever the rows have gained since.
    """

    def __init__(
        self, model: PreTrainedModel, *, tokenizer: Any = None, stop_below: float | None = None, form: Form = Form.AUTO
    ) -> None:
        if stop_below is not None and not 0 <= stop_below < 1:
            raise InvalidArgument(f"stop_below={stop_below}: must be in [0, 1); None never stops early")
        self.scorer = Scorer(model, form)
        self.tokenizer = tokenizer
        self.stop_below = stop_below

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Refuse a target that speaks other tokens."""
        check_vocabularies(target.model, tokenizer, self.scorer.model, self.tokenizer)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.scorer.admit(row)

    def release(self, row: int) -> None:
        self.scorer.release(row)

    def propose(self, context: DraftContext) -> Draft:
        context = self._within_reach(context)
        wanting = [b for b, room in enumerate(context.max_lengths) if room > 0]
        rows = [context.rows[b] for b in wanting]
        unseen = [context.histories[b][self.scorer.length(context.rows[b]) :] for b in wanting]
        self.scorer.feed(rows, [block[:-2] for block in unseen])
        blocks: list[Sequence[int]] = [()] * len(context.rows)
        for b, block in zip(wanting, unseen, strict=True):
            blocks[b] = block[-2:]
        return draft_with(self.scorer, context, blocks, self.stop_below)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.scorer.rewind([row], [min(length, self.scorer.length(row))])

    def _within_reach(self, context: DraftContext) -> DraftContext:
        """A draft model may see less far than the target or lack its last ids: there it falls silent."""
        room = tuple(
            max(0, min(most, self._room(row, history)))
            for row, most, history in zip(context.rows, context.max_lengths, context.histories, strict=True)
        )
        return context if room == context.max_lengths else replace(context, max_lengths=room)

    def _room(self, row: int, history: Sequence[int]) -> int:
        if any(token >= self.scorer.vocab_size for token in history[self.scorer.length(row) :]):
            return 0
        limit = self.scorer.context_length
        return sys.maxsize if limit is None else limit - len(history)
