"""The target's own first layers as the draft: no second model, no second cache."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from forerun.arguments import integer
from forerun.drafters.within_target import WithinTarget
from forerun.errors import InvalidArgument, UnsupportedModel


class EarlyExit(WithinTarget):
    """Drafts with the first `num_layers` layers, the final norm and the head of the target."""

    def __init__(self, num_layers: int, *, stop_below: float | None = None) -> None:
        self.num_layers = integer("num_layers", num_layers, 1, remedy="an early exit needs at least one layer")
        super().__init__(stop_below=stop_below)

    def made_of(self, target: PreTrainedModel) -> PreTrainedModel:
        return shallow(target, self.num_layers)


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
    if "forward" in module.__dict__:  # it is bound to the module itself, so the copy would run all layers
        raise InvalidArgument(
            f"EarlyExit: {type(module).__name__} has a forward of its own, put there by accelerate, say, and "
            "that runs all layers; load the target whole, or use another drafter, such as PromptLookup()"
        )
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
