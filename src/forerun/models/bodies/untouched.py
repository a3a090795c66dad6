"""Whether a model is exactly what transformers wrote, so that what its modules do can be known by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forerun.kernels.cpu.narrow import is_narrow
from forerun.kernels.scaled import ScaledWeight
from forerun.models import plain

# Where modules may come from beside the family's own file.
LIBRARIES = frozenset({"transformers.activations", "transformers.pytorch_utils"}) | {
    f"torch.nn.modules.{name}" for name in ("activation", "container", "dropout", "linear", "normalization", "sparse")
}

# Models that take images, too, and run texts as a causal model does: through `language_model` and the head alone.
WITH_IMAGES = frozenset({"Gemma3ForConditionalGeneration"})


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """What lies below the head, as far as texts go through it."""
    base: PreTrainedModel = model.base_model
    return base.language_model if type(model).__name__ in WITH_IMAGES else base


def _unused(model: PreTrainedModel) -> set[int]:
    """Modules and weights that no text goes through, by their ids."""
    base, text = model.base_model, text_model(model)
    beside = [part for part in base.children() if part is not text] if text is not base else []
    return {id(each) for part in beside for each in (*part.modules(), *part.parameters())}


def why_not(model: PreTrainedModel) -> str | None:
    """The first thing that was added to a causal model (or to its headless body); None where there is none."""
    if plain.has_global_hooks():
        return "forward hooks are registered for all modules"
    return next(_odd_modules(model), None) or next(_odd_weights(model), None)


def _odd_modules(model: PreTrainedModel) -> Iterator[str]:
    """Whatever would be skipped without a word: adapters, quantised layers, hooks, forwards of somebody's own."""
    home, base, unused = type(model).__module__, model.base_model, _unused(model)
    if not home.startswith("transformers.models.") or type(base).__module__ != home:
        yield f"the model is a {type(model).__name__}, which is not transformers' own"
        return
    if model is not base:
        name = type(model).__name__
        if not name.endswith(("ForCausalLM", "LMHeadModel")) and name not in WITH_IMAGES:
            yield f"the model is a {type(model).__name__}, not a causal one"
        if reason := plain.why_not_module(model.get_output_embeddings(), nn.Linear):
            yield f"its head {reason}"
    for name, module in model.named_modules():
        if id(module) in unused:
            continue
        if type(module).__module__ not in LIBRARIES | {home}:
            yield f"{name} is a {type(module).__name__}, which is not the family's own"
        elif not isinstance(module, nn.ModuleList) and (reason := plain.why_not_forward(module)):
            yield f"{name or 'the model'} {reason}"


def _odd_weights(model: PreTrainedModel) -> Iterator[str]:
    """Weights that are anything but plain memory, of the model's dtype and on its device; or used in two layers."""
    unused = _unused(model)
    for owner, module in model.named_modules():
        # A body may have transposed what modules say the other way round (merging.py); all else is read as it lies.
        may_be_turned = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        for name, weight in module.named_parameters(owner, recurse=False):
            if is_narrow(weight) or id(weight) in unused:
                continue  # narrow: float32 on the CPU, as it was stored
            is_known = isinstance(weight, ScaledWeight) or plain.is_memory(weight)
            if not is_known and not (may_be_turned and plain.is_turned_memory(weight)):
                yield f"{name} is a {type(weight).__name__} that does not lie in memory in one piece"
            elif weight.dtype != model.dtype or weight.device != model.device:
                yield f"{name} is {weight.dtype} on {weight.device}".replace("torch.", "")
    lists: Any = (module for module in text_model(model).modules() if isinstance(module, nn.ModuleList))
    places = [plain.address(weight) for layer in next(lists, ()) for weight in layer.parameters()]
    if len(set(places)) < len(places):  # it can lie side by side with the others of one layer alone
        yield "layers share weights"
