"""A Hugging Face causal model that scores blocks of tokens for rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.cache.ragged import RaggedCache, ranges
from forerun.math.attention import Form
from forerun.models import families
from forerun.models.attention import RaggedStates, ragged
from forerun.models.families import Layout

# Tokens of one prompt pass, all rows together: long enough to keep a processor busy, short enough to bound its memory.
PREFILL_TOKENS = 1024


class Scorer:
    """Rows of tokens behind a model: feed some, score some, cut some back."""

    def __init__(self, model: PreTrainedModel, form: Form = Form.AUTO, cache: RaggedCache | None = None) -> None:
        self.family = families.inspect(model)
        self.model = model.eval()
        self.form = form
        self.cache = cache if cache is not None else RaggedCache()
        self.device: torch.device = model.device
        self._base = model.base_model
        self._picks_logits = "logits_to_keep" in signature(model.forward).parameters
        self._takes_positions = "position_ids" in signature(self._base.forward).parameters

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    @property
    def context_length(self) -> int | None:
        return self.family.context_length

    def admit(self, row: int) -> None:
        self.cache.admit(row)

    def release(self, row: int) -> None:
        self.cache.release(row)

    def length(self, row: int) -> int:
        return self.cache.length(row)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` tokens of each row."""
        for row, length in zip(rows, lengths, strict=True):
            self.cache.rewind(row, length)

    def feed(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Take in tokens whose logits nobody needs (a prompt), in passes of bounded size, without running the head."""
        copies = self._twins(rows, blocks)
        waiting = [(r, list(b)) for r, b in zip(rows, blocks, strict=True) if len(b) and r not in copies]
        while waiting:
            now, waiting = _next_pass(waiting)
            self._forward(self._base, [row for row, _ in now], [block for _, block in now])
        for row, source in copies.items():
            self.cache.copy(source, row, self.cache.length(source))

    def _twins(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> dict[int, int]:
        """Empty rows that are given the same prompt as an earlier empty row: it is encoded once and copied."""
        first: dict[tuple[int, ...], int] = {}
        pairs = ((row, tuple(block)) for row, block in zip(rows, blocks, strict=True) if len(block))
        empty = [(row, block) for row, block in pairs if self.cache.length(row) == 0]
        return {row: first[block] for row, block in empty if first.setdefault(block, row) != row}

    def score(self, rows: Sequence[int], blocks: Sequence[Sequence[int]], tails: Sequence[int] | None = None) -> Tensor:
        """Logits [N, V] after each of the last `tails[i]` tokens of each block (after all by default), row by row."""
        ends = list(accumulate(len(block) for block in blocks))
        if tails is None or sum(tails) == ends[-1]:
            return self._logits(rows, blocks, None)
        starts = [end - tail for end, tail in zip(ends, tails, strict=True)]
        return self._logits(rows, blocks, ranges(starts, tails).to(self.device))

    def score_last(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after the last token of each block."""
        return self.score(rows, blocks, [1] * len(rows))

    def _logits(self, rows: Sequence[int], blocks: Sequence[Sequence[int]], keep: Tensor | None) -> Tensor:
        """The head runs only where it must: on all packed positions, or on those of `keep`."""
        if self.family.layout is Layout.PACKED and keep is not None and self._picks_logits:
            _, out = self._forward(self.model, rows, blocks, logits_to_keep=keep)
            picked: Tensor = out.logits[0]
            return picked
        states, out = self._forward(self.model, rows, blocks)
        packed: Tensor = out.logits[0] if states.pad_index is None else out.logits[states.pad_index >= 0]
        return packed if keep is None else packed[keep]

    @torch.inference_mode()
    def _forward(
        self, module: nn.Module, rows: Sequence[int], blocks: Sequence[Sequence[int]], **options: Any
    ) -> tuple[RaggedStates, Any]:
        """One pass of `module` (the whole model, or what lies below its head) over new tokens of some rows."""
        counts = [len(block) for block in blocks]
        before = [self.cache.length(row) for row in rows]
        states = RaggedStates(self.cache, self.cache.extend(rows, counts), self.family, self.form, self.device)
        tokens = torch.tensor([token for block in blocks for token in block], device=self.device)
        positions = states.positions
        if states.pad_index is None:
            tokens, positions = tokens[None], positions[None]
        else:
            place = states.pad_index.clamp(min=0)  # pads repeat the first token: nobody reads what becomes of them
            tokens, positions = tokens[place], positions[place]
        if self._takes_positions:
            options["position_ids"] = positions
        try:
            with ragged(self.model, states):
                return states, module(input_ids=tokens, past_key_values=states, use_cache=True, **options)
        except BaseException:
            self.rewind(rows, before)  # a pass that fails leaves no token behind
            raise


def _next_pass(
    waiting: list[tuple[int, list[int]]],
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """As many tokens as fit one pass, taken from the front; the rest stays."""
    now, rest, room = [], [], PREFILL_TOKENS
    for row, block in waiting:
        if room and block:
            now.append((row, block[:room]))
        if len(block) > room:
            rest.append((row, block[room:]))
        room -= min(room, len(block))
    return now, rest
