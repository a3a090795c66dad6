"""What one row of a window is held to, and what has to be remembered of it for the decisions after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.whisper.rules import Rules

DEEPEST = 32  # tokens of a draft, at most: what is further back than that has been decided
MOST_OPEN = 96  # ways that may or may not be taken, before those that were not are forgotten


class RowRules:
    """A logits processor for one row, which looks at all positions of a draft at once.

    It may be asked about drafts that come to nothing, by the drafter and by the target, in that order: what is kept of
    a position is what was said of it last, on the way the row really went.
    """

    def __init__(
        self, rules: Rules | None, others: Sequence[Any], num_prompt: int, padding: list[int], keeps_scores: bool
    ) -> None:
        self.rules, self.others, self.num_prompt, self.padding = rules, others, num_prompt, padding
        self.first: Tensor | None = None  # [V] the model's own logits where the window begins
        self._scores: dict[tuple[int, ...], Tensor] | None = {} if keeps_scores else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores.clone())

    def along(self, history: Sequence[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [n, V] of consecutive positions, the first of which follows `history`."""
        said = list(history[self.num_prompt :])
        if not said:
            self.first = logits[0].clone()
        if self.rules is not None:
            logits = self.rules.apply(logits, said, drafted)
        else:
            logits = torch.stack([self._called([*history, *drafted[:i]], row) for i, row in enumerate(logits)])
        self._keep(said, drafted, logits)
        return logits

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """[n, V] what each of `tokens`, the row's text, was chosen from."""
        assert self._scores is not None, "nobody asked for scores"
        return torch.stack([self._scores[tuple(tokens[:i])] for i in range(len(tokens))])

    def _called(self, history: list[int], row: Tensor) -> Tensor:
        """Processors of others count positions from the left edge of the padded batch."""
        ids, scores = torch.tensor([[*self.padding, *history]], device=row.device), row[None]
        for processor in self.others:
            scores = processor(ids, scores)
        return scores[0]

    def _keep(self, said: list[int], drafted: Sequence[int], logits: Tensor) -> None:
        if self._scores is None:
            return
        for i, row in enumerate(logits):
            self._scores[(*said, *drafted[:i])] = row
        if len(self._scores) > len(said) + MOST_OPEN:
            settled = len(said) - DEEPEST
            self._scores = {
                way: row for way, row in self._scores.items() if len(way) > settled or list(way) == said[: len(way)]
            }
