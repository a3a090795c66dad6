"""Drafts with layers like the target's over the target's own cache: no prompt is read twice, no keys are held twice."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from forerun.drafters.autoregressive import BranchingDrafter, ModelSteps, check_stop_below
from forerun.drafters.device_levels import ExitLevels
from forerun.drafters.device_model import DeviceEarlyExit
from forerun.errors import InvalidArgument
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.sharded import refuse_parts_of_sharded
from forerun.types import DraftContext


class WithinTarget(BranchingDrafter):
    """Drafts with a model made of the target, whose layers are the target's first ones or all of them.

    The keys of everything accepted are already in the target's cache, so the draft reads them there, writes its own
    behind them, and cuts them off again; the target overwrites them when it scores.
    """

    def __init__(self, *, stop_below: float | None = None) -> None:
        check_stop_below(stop_below)
        self.stop_below = stop_below
        self.scorer: Scorer | None = None

    @abstractmethod
    def made_of(self, target: PreTrainedModel) -> PreTrainedModel:
        """What drafts for this target."""

    def clone(self) -> Self:
        """The same for another target."""
        twin = copy.copy(self)
        twin.scorer = None
        return twin

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Called by the engine with the target whose layers are used, and again when they have changed."""
        refuse_parts_of_sharded(f"the drafter {type(self).__name__}", target.model)
        model = self.made_of(target.model)
        if isinstance(target, Seq2SeqScorer):
            self.scorer = Seq2SeqScorer(model, target.form, target.cache, use=target.kernels, beside=target)
        else:
            self.scorer = Scorer(model, target.form, cache=target.cache, use=target.kernels)

    @property
    def reads_targets_keys(self) -> bool:
        return True

    @property
    def draft_models(self) -> tuple[nn.Module, ...]:
        return () if self.scorer is None else (self.scorer.model,)

    def steps(self, context: DraftContext) -> ModelSteps:
        """The keys of guesses stand behind the target's own until the draft ends."""
        if self.scorer is None:
            raise InvalidArgument(
                f"{type(self).__name__} was used before it knew its target; give it to SpeculativeDecoder or Engine"
            )
        before = [self.scorer.length(row) for row in context.rows]
        unseen = [history[length:] for history, length in zip(context.histories, before, strict=True)]
        return ModelSteps(self.scorer, context, unseen, None, partial(self.scorer.rewind, context.rows, before))

    def device_draft(self) -> DeviceEarlyExit | None:
        return None if self.scorer is None else DeviceEarlyExit(self.scorer, self.stop_below)

    def device_levels(self) -> ExitLevels | None:
        return None if self.scorer is None else ExitLevels(self.scorer, self.stop_below)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The target's cache is cut back by the engine."""
