"""What the fused bodies ask of a model: one of the families whose layers are Llama's, with nothing added to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that do not depend on the batch


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
    head = model.get_output_embeddings()
    if head is not None and (type(head) is not nn.Linear or _has_hooks(head)):
        return f"its head is a {type(head).__name__}, or has forward hooks"
    return None


def odd_module(base: Any, why_not_weight: Callable[[Tensor], str | None]) -> str | None:
    """Adapters, quantised layers, hooks: whatever would be skipped without a word."""
    for name, module in base.named_modules():
        if _has_hooks(module):
            return f"{name or 'the model'} has forward hooks"
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or "layers." not in name:
            continue
        if weight.ndim == 2 and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__} of shape {tuple(weight.shape)}"
        if reason := why_not_weight(weight):
            return f"{name} is {reason}"
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def windows(config: Any) -> list[int]:
    """Keys each layer sees, 0 for all, as the families' own mask builders have it."""
    window = getattr(config, "sliding_window", None) or 0
    count: int = config.num_hidden_layers
    if config.model_type == "llama":
        return [0] * count
    if config.model_type == "mistral":
        return [window] * count
    return [window if kind == "sliding_attention" else 0 for kind in config.layer_types[:count]]
