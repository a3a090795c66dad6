"""What feature heads and parallel heads have in common: a draft head that listens to its target."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun import ops
from forerun.config import Kernels
from forerun.drafters.features import Features
from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, build, check_target, fill, load_drafter
from forerun.math.attention import Form
from forerun.models.bodies.merging import merged
from forerun.models.draft_head import DraftHead, check_plain
from forerun.models.offloaded import refuse_offloaded_head
from forerun.models.scorer import PREFILL_TOKENS, Scorer
from forerun.models.sharded import refuse_parts_of_sharded
from forerun.types import DraftContext


class Trunk:
    """Features, the body's keys and the target's embedding and head; rows follow those of the target.

    Row by row the body has taken in pairs 0 .. m - 1 of (feature i, token i + 1). A draft takes in the pairs that came
    since; pairs made of guesses are cut off again after it, so that what stays was made of true features alone.
    """

    def __init__(
        self,
        head: DraftHead,
        ids: Tensor | None = None,  # [Vd] ascending: all the draft can say
        made_for: Mapping[str, Any] | None = None,  # a manifest's entry `target`
        form: Form = Form.AUTO,
    ) -> None:
        self.head, self.form = head, form
        self.made_for = made_for if made_for is not None else {"hidden_size": head.config.hidden_size}
        self.ids = None if ids is None else ids.long()
        self.features = Features()
        self._target: Scorer | None = None
        self._ear: weakref.finalize[[Features], Trunk] | None = None  # takes itself off the target's list

    @classmethod
    def load(cls, folder: str | Path, kind: str, form: Form) -> Trunk:
        manifest, config, tensors = load_drafter(folder)
        if manifest.kind != kind:
            raise InvalidArgument(
                f"drafter {str(folder)!r} is of kind {manifest.kind}, not {kind}; use forerun.drafters.from_folder"
            )
        ids = tensors.pop(DRAFT_VOCABULARY, None)
        head = build(folder, manifest, tensors, lambda: DraftHead(config, manifest.num_blocks))
        fill(head, tensors, folder)
        return cls(head, ids, manifest.target, form)

    def clone(self) -> Trunk:
        return Trunk(self.head, self.ids, self.made_for, self.form)

    def bind(self, target: Scorer) -> None:
        """Listen to `target` from now on, with its embedding and head; a wrong one is refused."""
        check_target(self.made_for, target.model)
        refuse_parts_of_sharded("a drafter on features", target.model)
        check_plain(target.model)
        refuse_offloaded_head(target.model.get_output_embeddings())
        self._weight = self._draft_head(target)
        if self._ear is not None:
            self._ear()
        self._target, self.features = target, Features(target.cache.beside(target.device))
        target.observers.append(self.features)
        self._ear = weakref.finalize(self, target.observers.remove, self.features)  # a scorer may outlive its decoders
        head = self.head if _is_like(self.head, target) else _cast(self.head, target)
        self._fuse = head.fuse.weight.detach()
        self._blocks = merged(head.block_linears)[0] if head.blocks else None  # [blocks * H, H]
        cache = target.cache.beside(target.device)
        self.body = Scorer(head.body, self.form, cache, headless=True, use=target.kernels)
        self._embedding: Tensor = target.model.get_input_embeddings().weight.detach()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The head, and the body that stands in for its own where the target has another type or place."""
        body: Scorer | None = self.__dict__.get("body")  # None before it has met a target
        return (self.head,) if body is None else (self.head, body.model)

    def _draft_head(self, target: Scorer) -> Tensor:
        """[Vd, H] the target's head, or a copy of the rows that the draft can say."""
        weight: Tensor = target.model.get_output_embeddings().weight.detach()
        if self.ids is None:
            return weight
        if int(self.ids[-1]) >= len(weight):
            raise InvalidArgument(
                f"the draft vocabulary names token {int(self.ids[-1])}, the target has {len(weight)} tokens; "
                "use the drafter with its own target"
            )
        self.ids = self.ids.to(target.device)
        return weight[self.ids]

    @property
    def like(self) -> Tensor:
        """[0, H] in the features' type and place."""
        return self._embedding[:0]

    def admit(self, row: int) -> None:
        if self._target is not None:
            self.features.admit(row)
            self.body.admit(row)

    def release(self, row: int) -> None:
        if self._knows(row):
            self.features.release(row)
            self.body.release(row)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """A pair holds the token behind its feature: of n tokens that stand, n - 1 pairs do."""
        for row, length in zip(rows, lengths, strict=True):
            if self._knows(row):
                self.features.rewind(row, length)
                self.body.rewind([row], [min(max(length - 1, 0), self.body.length(row))])

    def within_reach(self, context: DraftContext) -> DraftContext:
        """Rows whose features are not all there (a prompt that is still to run, say) are left out, and so is what
        lies past the body's context."""
        if self._target is None:
            raise InvalidArgument(
                "a head on features was used before it knew its target; give it to SpeculativeDecoder or Engine"
            )
        room = tuple(
            max(0, min(most, self.room(row, len(history))))
            for row, most, history in zip(context.rows, context.max_lengths, context.histories, strict=True)
        )
        return context if room == context.max_lengths else replace(context, max_lengths=room)

    @torch.inference_mode()
    def catch_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> Tensor:
        """Take in every pair of true features; [B, H] what stands for the feature of each history's last token."""
        ends = [len(history) - 1 for history in histories]
        for row, end in zip(rows, ends, strict=True):
            self.body.rewind([row], [min(self.body.length(row), end - 1)])  # the last pair is always run: it answers
        if self._twins(rows, histories) or self._missing(rows, histories, 1) > PREFILL_TOKENS:
            self.read_up(rows, histories, 1)
        counts = [end - self.body.length(row) for row, end in zip(rows, ends, strict=True)]
        hidden = self._consume(rows, counts, dict(zip(rows, histories, strict=True)))
        if len(hidden) == len(rows):
            return hidden
        return hidden[torch.tensor(counts, device=hidden.device).cumsum(0) - 1]

    @torch.inference_mode()
    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], leave: int) -> None:
        """Take in every pair of true features but the last `leave`, in passes of bounded size."""
        copies, texts = self._twins(rows, histories), dict(zip(rows, histories, strict=True))
        while counts := self._next_pairs({row: text for row, text in texts.items() if row not in copies}, leave):
            self._consume(list(counts), list(counts.values()), texts)
        for row, source in copies.items():
            self.body.cache.copy(source, row, self.body.length(source))

    @torch.inference_mode()
    def finish(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        """Let no feature wait for the target's last layer: for whoever reads them without asking."""
        assert self._target is not None
        self.features.finish(rows, [range(len(history)) for history in histories], self._target)

    @torch.inference_mode()
    def branch(
        self, rows: Sequence[int], hidden: Tensor, tokens: Sequence[Sequence[int]], trees: Sequence[Sequence[int]]
    ) -> Tensor:
        """Several pairs further, each behind its own parent: features and tokens row by row -> [N, H].

        `trees` are the parents of all guessed pairs of each row, these included.
        """
        counts, flat = list(map(len, tokens)), [token for row_tokens in tokens for token in row_tokens]
        return self.body.run(rows, counts, self.inputs(torch.tensor(flat, device=hidden.device), hidden), trees)

    @torch.inference_mode()
    def spread(self, hidden: Tensor, width: int) -> Tensor:
        """What each of the first `width` parallel heads reads: [B, H] -> [B, width, H]."""
        assert self._blocks is not None
        changes = self._product(hidden, self._blocks[: width * hidden.shape[1]]).unflatten(1, (width, -1))
        return hidden.unsqueeze(1) + F.silu(changes)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., Vd], of the draft vocabulary alone where there is one."""
        logits = self._product(hidden.flatten(0, -2), self._weight)
        return logits.view(*hidden.shape[:-1], -1)

    def drop_guesses(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        for row, history in zip(rows, histories, strict=True):
            if self._knows(row):
                self.body.rewind([row], [min(self.body.length(row), max(len(history) - 1, 0))])

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What the body reads of pairs of token ids [N] and features [N, H]: [N, H]."""
        return self._product(torch.cat((F.embedding(tokens, self._embedding), features), dim=-1), self._fuse)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] and [M, K] -> [N, M], by whatever is faster here."""
        if x.is_cuda and self.body.kernels is not Kernels.OFF:
            return ops.project(x, weight)
        return ops.linear(x, weight, None, self.body.kernels)

    def _knows(self, row: int) -> bool:
        return self.features.knows(row)

    def room(self, row: int, length: int) -> int:
        """Tokens that can be drafted for a row of `length` tokens; 0 where features of it are missing."""
        if length < 2 or self.features.length(row) < length - 1:
            return 0
        limit = self.body.context_length
        return sys.maxsize if limit is None else limit - (length - 1) + 1

    def _twins(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> dict[int, int]:
        """Empty rows with the history of an earlier empty row: their pairs are run once and copied."""
        first: dict[tuple[int, ...], int] = {}
        empty = [(r, tuple(h)) for r, h in zip(rows, histories, strict=True) if not self.body.length(r) and len(h) > 2]
        return {row: first[history] for row, history in empty if first.setdefault(history, row) != row}

    def _missing(self, rows: Sequence[int], histories: Sequence[Sequence[int]], leave: int) -> int:
        """Pairs of all rows together that the body has not taken in, the last `leave` of each row not counted."""
        return sum(
            max(0, len(history) - 1 - leave - self.body.length(row))
            for row, history in zip(rows, histories, strict=True)
        )

    def _next_pairs(self, histories: Mapping[int, Sequence[int]], leave: int) -> dict[int, int]:
        """How many of those each row takes in next, as many as fit one pass."""
        room, counts = PREFILL_TOKENS, {}
        for row, history in histories.items():
            if take := min(room, self._missing([row], [history], leave)):
                counts[row] = take
                room -= take
        return counts

    def _consume(self, rows: Sequence[int], counts: Sequence[int], histories: Mapping[int, Sequence[int]]) -> Tensor:
        """Run the next `counts[i]` pairs of each row: [N, H]."""
        starts = [self.body.length(row) for row in rows]
        spans = zip(rows, starts, counts, strict=True)
        tokens = [token for row, start, count in spans for token in histories[row][start + 1 : start + count + 1]]
        assert self._target is not None
        features = self.features.take(rows, starts, counts, self._target)
        return self.body.run(rows, counts, self.inputs(torch.tensor(tokens, device=features.device), features))


def _is_like(head: DraftHead, target: Scorer) -> bool:
    weight = head.fuse.weight
    return bool(weight.dtype == target.model.dtype and weight.device == target.device)


def _cast(head: DraftHead, target: Scorer) -> DraftHead:
    """A copy in the target's type and place: the head that was given may be in training."""
    return copy.deepcopy(head).to(device=target.device, dtype=target.model.dtype)
