"""The target's own first layers as the draft: no second model, no second cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from forerun.arguments import integer
from forerun.drafters.autoregressive import ModelSteps, draft_with
from forerun.drafters.base import BranchingDrafter
from forerun.drafters.device_levels import ExitLevels
from forerun.drafters.device_model import DeviceEarlyExit
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.sharded import refuse_parts_of_sharded
from forerun.types import Draft, DraftContext


class EarlyExit(BranchingDrafter):
    """Drafts with the first `num_layers` layers, the final norm and the head of the target.

    The first layers' keys of everything accepted are already in the target's cache, so the draft reads them there,
    writes its own behind them, and cuts them off again; the target overwrites them when it scores.
    """

    def __init__(self, num_layers: int, *, stop_below: float | None = None) -> None:
        self.num_layers = integer("num_layers", num_layers, 1, remedy="an early exit needs at least one layer")
        self.stop_below = stop_below
        self.scorer: Scorer | None = None

    def clone(self) -> Self:
        """The same for another target."""
        twin = copy.copy(self)
        twin.scorer = None
        return twin

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Called once by the engine with the target whose layers are used."""
        refuse_parts_of_sharded("an early exit", target.model)
        first = shallow(target.model, self.num_layers)
        if isinstance(target, Seq2SeqScorer):
            self.scorer = Seq2SeqScorer(first, target.form, target.cache, use=target.kernels, beside=target)
        else:
            self.scorer = Scorer(first, target.form, cache=target.cache, use=target.kernels)

    def propose(self, context: DraftContext) -> Draft:
        steps = self.steps(context)
        try:
            return draft_with(steps.scorer, context, steps.unseen, self.stop_below)
        finally:
            steps.close()

    def steps(self, context: DraftContext) -> ModelSteps:
        """For trees: laws behind several guesses at once, their keys behind the target's own."""
        if self.scorer is None:
            raise InvalidArgument(
                "EarlyExit was used before it knew its target; give it to SpeculativeDecoder or Engine"
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


def shallow(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The same model with only its first layers: modules are shared, only the path to the layer list is copied."""
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "hidden_size_per_layer_input", 0):
        raise UnsupportedModel(
            f"{type(model).__name__} makes the inputs of all layers from one table, so its first layers cannot run "
            "alone; use another drafter, such as PromptLookup or a smaller model"
        )
    path = _decoder_layers(model) if is_seq2seq else _layer_list(model, config.num_hidden_layers)
    depth = len(model.get_submodule(path))
    if num_layers >= depth:
        raise InvalidArgument(
            f"num_layers={num_layers}: {type(model).__name__} has {depth} layers; an early exit must leave some out"
        )
    shorter = None
    if not is_seq2seq:  # encoder and decoder have configurations of their own, which tell no number of layers apart
        shorter = copy.copy(config)
        shorter.num_hidden_layers = num_layers
    *parents, name = path.split(".")
    top = parent = _twin(model, shorter)
    for step in parents:
        child = _twin(getattr(parent, step), shorter)
        parent._modules[step] = child
        parent = child
    parent._modules[name] = nn.ModuleList(list(getattr(parent, name))[:num_layers])
    return top


def _twin(module: Any, config: Any) -> Any:
    """A copy of one module object that shares its parameters and children but not its list of children."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = dict(module._modules)
    twin.__dict__.pop("_forerun_configs", None)
    if config is not None and hasattr(twin, "config"):
        twin.config = config
    return twin


def _decoder_layers(model: PreTrainedModel) -> str:
    decoder = model.get_decoder()
    within = next(name for name, module in model.named_modules() if module is decoder)
    lists = [name for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]
    return f"{within}.{min(lists, key=lambda name: name.count('.'))}"


def _layer_list(model: PreTrainedModel, num_layers: int) -> str:
    lists: list[str] = [
        name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers
    ]
    if not lists:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its {num_layers} layers in no list of so many modules, so its first layers "
            "cannot run alone; use another drafter, such as PromptLookup or a smaller model"
        )
    return min(lists, key=lambda name: name.count("."))  # a layer may hold a list of its own, of experts say
