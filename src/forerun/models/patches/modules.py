"""Decoders of transformers' modules in fewer and faster launches, for the duration of a recorded pass.

In a graph a launch costs about two microseconds whatever it does, and T5's norm is eight of them, its activation eight
more; Whisper's attention copies queries, keys and values that our kernels read where they lie. Such modules are said by
our own kernels, and so are products of a few rows; outside a pass the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperDecoderLayer

from forerun import ops
from forerun.math.skinny import LayerNorm, Norm
from forerun.models.attention import attention
from forerun.models.passes import replacing
from forerun.models.plain import is_memory, runs_its_class, why_not_module

Forward = Callable[..., Any]


class ModulePatches:
    """The modules of a decoder that can be said in fewer launches. Nobody's own wrapping of a module is touched."""

    def __init__(self, *parts: nn.Module) -> None:
        modules = {id(module): module for part in parts for module in part.modules()}
        self._patched = [
            (module, patch)
            for module in modules.values()
            if (patch := PATCHES.get(type(module))) is not None and _is_plain(module)
        ]

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        changed = [pair for pair in self._patched if "forward" not in pair[0].__dict__]
        with replacing([(module, "forward", partial(forward, module)) for module, forward in changed]):
            yield


def _is_plain(module: nn.Module) -> bool:
    """Whether neither it nor the norms that its layer takes upon itself are anything but transformers'."""
    norms = [child for name, child in module.named_children() if name.endswith("layer_norm")]
    weights = (p for part in (module, *norms) for p in part._parameters.values() if p is not None)
    return (
        runs_its_class(module)
        and all(why_not_module(norm, nn.LayerNorm) is None for norm in norms)
        and all(map(is_memory, weights))
    )


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    return ops.project(x.reshape(-1, x.shape[-1]), module.weight, module.bias).view(*x.shape[:-1], -1)


def _norm(module: Any, x: Tensor) -> Tensor:
    return ops.normed(x.reshape(-1, x.shape[-1]), Norm(module.weight, module.variance_epsilon)).view_as(x)


def _gelu(module: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _whisper_attention(
    module: Any,
    hidden_states: Tensor,  # [1, N, H]
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,  # both caches of a pass
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """What `WhisperAttention.forward` does, without copies: heads are views of what the products made."""

    def heads(project: nn.Module, states: Tensor) -> Tensor:
        in_heads: Tensor = project(states).unflatten(-1, (-1, module.head_dim))
        return in_heads.transpose(1, 2)

    query = heads(module.q_proj, hidden_states)
    if key_value_states is None:
        keys, values = (heads(project, hidden_states) for project in (module.k_proj, module.v_proj))
        past_key_values.self_attention_cache.update(keys, values, module.layer_idx)
    else:
        keys = values = past_key_values.cross_attention_cache.layers[module.layer_idx].keys
    out, _ = attention(module, query, keys, values, attention_mask, scaling=module.scaling, **others)
    return module.out_proj(out.flatten(2)), None


def _whisper_layer(
    module: Any,
    hidden_states: Tensor,  # [1, N, H]
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = True,
    **others: Any,
) -> Tensor:
    """What `WhisperDecoderLayer.forward` does, each sum in one launch with what follows it or comes before."""
    x = hidden_states[0]
    inner = ops.normed(x, _layer_norm(module.self_attn_layer_norm))
    change, _ = module.self_attn(inner[None], past_key_values=past_key_values, attention_mask=attention_mask, **others)
    x, inner = ops.added(x, change[0], _layer_norm(module.encoder_attn_layer_norm))
    change, _ = module.encoder_attn(
        inner[None],
        key_value_states=encoder_hidden_states,
        attention_mask=encoder_attention_mask,
        past_key_values=past_key_values,
        **others,
    )
    x, inner = ops.added(x, change[0], _layer_norm(module.final_layer_norm))
    total: Tensor = x + module.fc2(module.activation_fn(module.fc1(inner)))
    return total[None]


def _layer_norm(module: nn.LayerNorm) -> LayerNorm:
    return LayerNorm(module.weight, module.bias, module.eps)


# Types are exact: what is derived from them may do anything. Where apex is installed T5's norms are its own, and lean.
PATCHES: dict[type[nn.Module], Forward] = {
    nn.Linear: _product,
    NewGELUActivation: _gelu,
    WhisperAttention: _whisper_attention,
    WhisperDecoderLayer: _whisper_layer,
    **{kind: _norm for kind in (T5LayerNorm, MT5LayerNorm) if kind.__module__.startswith("transformers")},
}
