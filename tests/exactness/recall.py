"""A scorer that remembers: a tiny model is asked once about every history, so thousands of rows cost few passes.

Engine, drafters, policies and verification are the real thing; test_real_scorer.py runs the real scorer as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.cache.ragged import RaggedCache
from forerun.math.tree import is_chain
from forerun.models.scorer import Scorer

History = tuple[int, ...]


class Texts(RaggedCache):
    """Rows of tokens where the real cache has rows of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}

    def admit(self, row: int) -> None:
        assert row not in self.texts, f"row {row} is there already"
        self.texts[row] = []

    def release(self, row: int) -> None:
        del self.texts[row]

    def length(self, row: int) -> int:
        return len(self.texts[row])

    def slot(self, row: int) -> int:
        return row

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= len(self.texts[source]), "a row has no more keys than it holds"
        self.texts[target] = self.texts[source][:length]

    def rewind(self, row: int, length: int) -> None:
        assert length <= len(self.texts[row]), "a cache cannot be cut to more than it holds"
        del self.texts[row][length:]


class RecallingScorer(Scorer):
    """Answers as the model does, from a table of histories that grows as new ones are met."""

    def __init__(self, model: PreTrainedModel, cache: Texts | None = None) -> None:
        self.kept = cache if cache is not None else Texts()
        super().__init__(model, cache=self.kept)
        self.spend: Callable[[int], None] = lambda positions: None  # called with the positions scored, to let time pass
        self._known: dict[History, int] = {}
        self._table = torch.empty(0, self.vocab_size)

    def feed(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        for row, block in zip(rows, blocks, strict=True):
            self.kept.texts[row].extend(block)

    def score(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        tails: Sequence[int] | None = None,
        trees: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        assert trees is None or all(map(is_chain, trees)), "of texts, and a tree is none"
        asked = []
        for row, block, tail in zip(rows, blocks, tails or map(len, blocks), strict=True):
            text = self.kept.texts[row]
            for place, token in enumerate(block):
                text.append(token)
                if place >= len(block) - tail:
                    asked.append(tuple(text))
        self.spend(len(asked))
        return self._recall(asked)

    def answer(self, histories: Tensor) -> Tensor:
        """What the model says after each of histories [N, T], all of one length: [N, V]."""
        logits: Tensor = self.model(histories, use_cache=False).logits[:, -1]
        return logits

    def _recall(self, asked: Sequence[History]) -> Tensor:
        self._learn({history for history in asked if history not in self._known})
        return self._table[torch.tensor([self._known[history] for history in asked])]

    @torch.no_grad()
    def _learn(self, histories: set[History]) -> None:
        for length in sorted({len(history) for history in histories}):
            new = sorted(history for history in histories if len(history) == length)
            self._known.update((history, len(self._table) + i) for i, history in enumerate(new))
            self._table = torch.cat([self._table, self.answer(torch.tensor(new))])


class ScriptedScorer(RecallingScorer):
    """A model that is a table of laws by the last token, [V, V]; zeros are impossible tokens."""

    def __init__(self, model: PreTrainedModel, laws: Tensor) -> None:
        super().__init__(model)
        self.logits = laws.log().float()

    def _recall(self, asked: Sequence[History]) -> Tensor:
        return self.logits[torch.tensor([history[-1] for history in asked])]
