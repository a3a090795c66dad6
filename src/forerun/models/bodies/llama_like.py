"""What the fused body on a CPU asks of a model: a family whose layers are Llama's, with nothing added to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from forerun.models import plain

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that do not depend on the batch
Module = type[nn.Module]


@dataclass(frozen=True, slots=True)
class Classes:
    """The modules of one family. Types are exact: what is derived from them may do anything."""

    causal: Module
    base: Module
    layer: Module
    attention: Module
    mlp: Module
    norm: Module
    rotary: Module
    head_norms: bool = False  # norms of queries and keys


FAMILIES = {
    "llama": Classes(
        llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP,
        llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding,
    ),
    "mistral": Classes(
        mistral.MistralForCausalLM, mistral.MistralModel, mistral.MistralDecoderLayer, mistral.MistralAttention,
        mistral.MistralMLP, mistral.MistralRMSNorm, mistral.MistralRotaryEmbedding,
    ),
    "qwen2": Classes(
        qwen2.Qwen2ForCausalLM, qwen2.Qwen2Model, qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP,
        qwen2.Qwen2RMSNorm, qwen2.Qwen2RotaryEmbedding,
    ),
    "qwen3": Classes(
        qwen3.Qwen3ForCausalLM, qwen3.Qwen3Model, qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP,
        qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding, head_norms=True,
    ),
}  # fmt: skip


def why_not(model: PreTrainedModel) -> str | None:
    """What makes `model` (or a headless body) another kind of decoder; None where nothing does."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(sorted(FAMILIES))}"
    if getattr(config, "hidden_act", None) != "silu" or getattr(config, "mlp_bias", False):
        return "its MLP is not the plain gated one"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1:
        return f"rotary embedding of type {rope.get('rope_type')}"
    if plain.has_global_hooks():
        return "forward hooks are registered for all modules"
    return next(_odd_parts(model, FAMILIES[config.model_type]), None)


def why_not_weights(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> str | None:
    """The first weight below the head that is anything but plain memory of the shape that the configuration says."""
    return next(_odd_weights(model.base_model, dtype, device), None)


def _odd_parts(model: Any, classes: Classes) -> Iterator[str]:
    """Whatever would be skipped without a word: adapters, quantised layers, hooks, forwards of somebody's own."""
    if type(model) not in (classes.causal, classes.base):
        yield f"the model is a {type(model).__name__}, not a {classes.causal.__name__}"
        return
    base = model.base_model
    if model is not base:
        yield from _named("the model", plain.why_not_forward(model))
        yield from _named("its head", plain.why_not_module(model.get_output_embeddings(), nn.Linear))
    yield from _named("the model", plain.why_not_module(base, classes.base))
    yield from _named("norm", plain.why_not_module(base.norm, classes.norm))
    yield from _named("rotary_emb", plain.why_not_module(base.rotary_emb, classes.rotary))
    config = base.config
    if len(base.layers) != config.num_hidden_layers:
        yield f"{len(base.layers)} layers where the configuration has {config.num_hidden_layers}"
    for index, layer in enumerate(base.layers):
        yield from _named(f"layers.{index}", plain.why_not_module(layer, classes.layer))
        for name, kind in _inside(classes).items():
            yield from _named(f"layers.{index}.{name}", plain.why_not_module(_at(layer, name), kind))
        yield from _named(f"layers.{index}", _odd_settings(layer, index, base, classes))


def _inside(classes: Classes) -> dict[str, Module]:
    """The modules of a layer."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if classes.head_norms:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    return {
        "self_attn": classes.attention,
        "mlp": classes.mlp,
        "mlp.act_fn": SiLUActivation,
        **dict.fromkeys(norms, classes.norm),
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), nn.Linear),
        **dict.fromkeys((f"mlp.{name}_proj" for name in ("gate", "up", "down")), nn.Linear),
    }


def _odd_settings(layer: Any, index: int, base: Any, classes: Classes) -> str | None:
    """Numbers that a layer has for itself and the bodies take from the first layer or from the configuration."""
    first, own = base.layers[0].self_attn, layer.self_attn
    if own.layer_idx != index:
        return f"writes the keys of layer {own.layer_idx}"
    if (own.scaling, own.head_dim) != (first.scaling, first.head_dim):
        return "scales its attention by a factor of its own"
    norms = [_at(layer, name) for name, kind in _inside(classes).items() if kind is classes.norm]
    if any(norm.variance_epsilon != base.config.rms_norm_eps for norm in (*norms, base.norm)):
        return "has a norm with an epsilon of its own"
    if any(_at(layer, f"mlp.{name}_proj").bias is not None for name in ("gate", "up", "down")):
        return "has a bias in its MLP"
    return None


def _odd_weights(base: Any, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    config, size = base.config, base.layers[0].self_attn.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    places = [(f"layers.{i}.{name}", _at(layer, name), shape)
              for i, layer in enumerate(base.layers) for name, shape in shapes.items()]  # fmt: skip
    for name, module, shape in [*places, ("norm", base.norm, (hidden,))]:
        if module is None:
            continue
        yield from _named(f"{name}.weight", plain.why_not_weight(module.weight, shape, dtype, device))
        if (bias := getattr(module, "bias", None)) is not None:
            yield from _named(f"{name}.bias", plain.why_not_weight(bias, shape[:1], dtype, device))


def _named(name: str, reason: str | None) -> Iterator[str]:
    if reason is not None:
        yield f"{name} {reason}"


def _at(module: Any, path: str) -> Any:
    """What lies at `a.b` within a module; None where nothing does."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def windows(config: Any) -> list[int]:
    """Keys each layer sees, 0 for all, as the families' own mask builders have it."""
    window = getattr(config, "sliding_window", None) or 0
    count: int = config.num_hidden_layers
    if config.model_type == "llama":
        return [0] * count
    if config.model_type == "mistral":
        return [window] * count
    return [window if kind == "sliding_attention" else 0 for kind in config.layer_types[:count]]
