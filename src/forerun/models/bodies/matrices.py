"""Which weights of a model may be stored narrow on a CPU: what its fused layers multiply, its embedding and its head.

A description says it, so there is no list of families. Only shapes are looked at: weights may still be on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.whisper.modeling_whisper import WhisperForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from forerun.models.bodies import readers
from forerun.models.bodies.description import Decoder, Experts, LatentAttention
from forerun.models.bodies.parts import NotDescribed, is_product


def may_be_fused(config: Any) -> bool:
    """Whether fused layers on a CPU may run a model with this configuration; `matrices` knows once it is made."""
    return config.model_type == "whisper" or config.get_text_config(decoder=True).model_type in readers.FAMILIES


def matrices(model: nn.Module) -> list[nn.Module] | None:
    """The modules that hold such weights, each once; None where no fused layers on a CPU run the model.

    Tables of positions are looked up whole, and experts are indexed one by one by the modules that run long prompts:
    they stay as they are.
    """
    from forerun.models.bodies import cpu

    if not isinstance(model, PreTrainedModel) or model.device.type != "cpu":
        return None
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    modules: list[nn.Module]
    if isinstance(model, WhisperForConditionalGeneration):
        modules = [module for module in model.modules() if type(module) is nn.Linear]
    else:
        try:
            decoder = readers.describe(model)
        except NotDescribed:
            return None
        if next(cpu.odd_sizes(decoder), None) is not None:
            return None
        modules = list(_products(decoder))
    return list(dict.fromkeys(module for module in (*modules, *ends) if module is not None))


def _products(decoder: Decoder) -> Iterator[nn.Module]:
    for layer in decoder.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttention):
            # Not `up`: parts of it are multiplied head by head, as floats.
            yield from attention.down
            yield from () if attention.query_up is None else (attention.query_up,)
        else:
            yield from attention.qkv
        yield attention.out
        for part in (layer.mlp, layer.late_experts):
            mlp = part.shared if isinstance(part, Experts) else part
            if mlp is not None:
                yield from (*mlp.first, mlp.second)


def may_hold(module: nn.Module) -> bool:
    """Whether such a weight may be in a module, by its class."""
    return is_product(module) or type(module) is nn.Embedding


def is_turned(module: nn.Module) -> bool:
    """Whether a module's weight is [inputs, outputs]."""
    return isinstance(module, Conv1D)
