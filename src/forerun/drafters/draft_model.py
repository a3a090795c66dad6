"""A smaller model with the same tokenizer, the classic draft of Leviathan et al. and Chen et al."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.arguments import refuse
from forerun.cache.base import KeyValueCache
from forerun.config import Kernels
from forerun.drafters.autoregressive import BranchingDrafter, ModelSteps, ScoreLast, check_stop_below, grow_chain
from forerun.drafters.causal_folder import CausalFolder
from forerun.drafters.compatible import check_encoders, check_vocabularies
from forerun.drafters.decoder_folder import DecoderFolder
from forerun.drafters.device_levels import ModelLevels
from forerun.drafters.device_model import FIRST, DeviceDraftModel
from forerun.drafters.model_folder import ModelFolder
from forerun.errors import InvalidArgument
from forerun.loading import load_model
from forerun.loading.drafter_folder import is_drafter_folder, read_kind
from forerun.math.attention import Form
from forerun.models.adapters import unwrapped
from forerun.models.evaluation import Evaluation
from forerun.models.families import check_model
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer, scorer_of
from forerun.models.sharded import is_sharded
from forerun.types import Draft, DraftContext, Source


class DraftModel(BranchingDrafter):
    """Drafts with `model`; keeps a ragged cache of its own that follows the rows.

    After a fully kept draft its cache is one key behind, and after rounds without drafts many: each draft begins by
    taking in whatever the rows have gained since. For an encoder-decoder target it is a smaller model of the family,
    which reads the source with an encoder of its own, or a decoder that `shares_encoder` with the target, as
    Distil-Whisper's do: its own encoder is never run. It may be given to any number of decoders: each works with a
    clone, which shares the model's weights. A model that is split over processes drafts for a target that is split over
    the same ones.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelFolder,
        *,
        tokenizer: Any = None,
        stop_below: float | None = None,
        shares_encoder: bool = False,
        form: Form = Form.AUTO,
    ) -> None:
        check_stop_below(stop_below)
        _check_model(model)
        self.tokenizer, self.stop_below, self.form = tokenizer, stop_below, form
        self.shares_encoder = shares_encoder or isinstance(model, DecoderFolder)
        self.ids: Tensor | None = None  # [Vd] all it can say, where that is not everything
        self.last_id: int | None = None  # that its embedding has; None where it has all of the target's
        self.score_last: ScoreLast | None = None  # lent by an engine that has its passes recorded
        self._has_scorer = False
        self._folder = model if isinstance(model, ModelFolder) else None
        self._split: PreTrainedModel | None = None  # over processes, which run in step once the target has met them
        if not isinstance(model, ModelFolder):
            model = unwrapped(model)
            if is_sharded(model):
                self._split = model
            else:
                self._run_with(model)

    @classmethod
    def load(
        cls, folder: str | Path, *, stop_below: float | None = None, form: Form = Form.AUTO, **loading: Any
    ) -> DraftModel:
        """From the folder that training wrote, or an ordinary model folder; `loading` is `load_model`'s, for those."""
        if is_drafter_folder(folder):
            kind = DecoderFolder if read_kind(folder) == "decoder" else CausalFolder
            return cls(kind.load(folder), stop_below=stop_below, form=form)
        model, tokenizer = load_model(folder, **{"encoder_decoder": True, **loading})
        return cls(model, tokenizer=tokenizer, stop_below=stop_below, form=form)

    def clone(self) -> Self:
        """The same model with rows of its own."""
        twin = copy.copy(self)
        twin.score_last = None
        if self._folder is None and self._split is None:
            twin._run_with(self.scorer.model, use=self.scorer.kernels)
        else:  # its model is made of the target's parts, or waits for the target's processes
            twin.ids = None
            twin._has_scorer = False
        return twin

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Refuse a target with another tokenizer; take from it what a trained draft shares with it."""
        if self._split is not None:
            check_vocabularies(target.model, tokenizer, self._split, self.tokenizer)
            self._run_with(self._split, target)
        elif self._folder is None:
            check_vocabularies(target.model, tokenizer, self.scorer.model, self.tokenizer)
            check_encoders(target, self.scorer, self.shares_encoder)
            if self.shares_encoder:
                self._borrow_from(target)
            else:
                self._run_with(self.scorer.model, target)
        else:
            model, self.ids = self._folder.beside(target.model)
            self._run_with(model, target)
            if self.shares_encoder:
                self._borrow_from(target)
        self.last_id = None if self._num_embeddings >= target.vocab_size else self._num_embeddings - 1

    def has_changed(self) -> bool:
        """Whether the model is no longer what its passes were made from."""
        return self.scorer.has_changed()

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.scorer.admit(row)

    def read(self, row: int, source: Source) -> None:
        """With an encoder; a draft without one guesses from the decoder's text alone."""
        if isinstance(self.scorer, Seq2SeqScorer):
            self.scorer.read(row, source)

    def release(self, row: int) -> None:
        self.scorer.release(row)

    @property
    def caches(self) -> tuple[KeyValueCache, ...]:
        return (self.scorer.cache,)

    @property
    def split_models(self) -> tuple[PreTrainedModel, ...]:
        return () if self._split is None else (self._split,)

    @property
    def draft_models(self) -> tuple[nn.Module, ...]:
        scorer = self.scorer if self._has_scorer else None  # some have to meet their target first
        return self.split_models if scorer is None else (scorer.model,)

    def num_unread(self, row: int, length: int) -> int:
        return max(length - FIRST - self.scorer.length(row), 0)

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        """Take in everything of each row but its last `first` tokens, from where known beginnings end."""
        for row, history in zip(rows, histories, strict=True):
            if self.scorer.length(row) == 0:
                self.scorer.begin(row, history[:-first])
        behind = [history[self.scorer.length(row) : -first] for row, history in zip(rows, histories, strict=True)]
        if any(behind):
            self.scorer.feed(rows, [self._readable(unread) for unread in behind])
            for row, history, unread in zip(rows, histories, behind, strict=True):
                if unread:
                    self.scorer.remember(row, history)

    def steps(self, context: DraftContext) -> ModelSteps:
        """For trees: the guesses' keys are dropped afterwards."""
        context = self._within_reach(context)
        self.scorer.check_trees()
        return self._steps(context)

    def propose(self, context: DraftContext) -> Draft:
        """A chain, whose guesses' keys stay: those of guesses that are kept need not be computed again."""
        return grow_chain(self._steps(self._within_reach(context), self.score_last), self.stop_below)

    def _steps(self, context: DraftContext, score_last: ScoreLast | None = None) -> ModelSteps:
        wanting = [b for b, room in enumerate(context.max_lengths) if room > 0]
        rows = [context.rows[b] for b in wanting]
        self.read_up(rows, [context.histories[b] for b in wanting], FIRST)
        unseen: list[Sequence[int]] = [()] * len(context.rows)
        for b, row in zip(wanting, rows, strict=True):
            unseen[b] = self._readable(context.histories[b][self.scorer.length(row) :])

        def close() -> None:
            self.rewind(context.rows, [len(history) for history in context.histories])

        return ModelSteps(self.scorer, context, unseen, self.ids, close, score_last)

    def device_draft(self) -> DeviceDraftModel:
        return DeviceDraftModel(self)

    def device_levels(self) -> ModelLevels:
        return ModelLevels(self)

    def room(self, longest: int) -> int:
        """Tokens it can draft for a row of `longest` tokens."""
        limit = self.scorer.context_length
        return sys.maxsize if limit is None else max(0, limit - longest)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.scorer.rewind([row], [min(length, self.scorer.length(row))])

    def _run_with(self, model: PreTrainedModel, target: Scorer | None = None, use: Kernels | None = None) -> None:
        """With kernels and memory like the target's, once that is known."""
        cache, tokens = None, None
        if target is not None and model is self._split:  # other processes make a cache of the same size
            tokens = target.cache.num_tokens
        elif target is not None:
            cache = target.cache.beside(model.device)
        use = use if target is None else target.kernels
        with Evaluation((model,)):
            self.scorer: Scorer = scorer_of(model, self.form, cache, use=use, is_draft=True, cache_tokens=tokens)
        self._has_scorer = True
        self._count_embeddings(model)

    def _borrow_from(self, target: Scorer) -> None:
        """Read with the target's encoder from now on."""
        assert isinstance(target, Seq2SeqScorer)
        target.keeps_states = True
        model = self.scorer.model
        cache = target.cache.beside(model.device)
        self.scorer = Seq2SeqScorer(model, self.form, cache, use=target.kernels, borrowed=target.states_of)

    def _count_embeddings(self, model: PreTrainedModel) -> None:
        body = model.get_decoder() if isinstance(self.scorer, Seq2SeqScorer) else model
        embedding = getattr(body.get_input_embeddings(), "weight", None)
        self._num_embeddings = self.scorer.vocab_size if embedding is None else int(embedding.shape[0])

    def _within_reach(self, context: DraftContext) -> DraftContext:
        """A draft model may have a shorter context than the target: rows beyond it get no draft."""
        if not self._has_scorer:
            raise InvalidArgument(
                "a DraftModel that is trained or split was used before it knew its target; give it to "
                "SpeculativeDecoder or Engine"
            )
        room = tuple(
            min(most, self.room(len(history)))
            for most, history in zip(context.max_lengths, context.histories, strict=True)
        )
        return context if room == context.max_lengths else replace(context, max_lengths=room)

    def _readable(self, tokens: Sequence[int]) -> Sequence[int]:
        """Ids that padding gave the target alone are read as the last one there is, as recorded rounds read them."""
        last = self.last_id
        return tokens if last is None or max(tokens, default=0) <= last else [min(token, last) for token in tokens]


def _check_model(model: Any) -> None:
    if isinstance(model, str | Path):
        refuse("model", model, f"is a name; load it: DraftModel.load({str(model)!r})")
    if not isinstance(model, ModelFolder):
        check_model("model", model)
