"""What the readers of all families share: norms, products, MLPs, rotations, read off modules into a description.

Everything is taken from the modules themselves (weights, epsilons), and their classes are known by name: they are
transformers' or torch's, as `bodies.untouched` has made sure. What there are no words for is `NotDescribed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forerun.math.experts import SWIGLU_LIMIT, SWIGLU_SLOPE
from forerun.math.routing import Router, Scoring
from forerun.math.skinny import Activation, LayerNorm, Norm
from forerun.models.bodies.description import AngleTable, AnyNorm, Decoder, DecoderLayer, Experts, Mlp, Route
from forerun.models.bodies.merging import Product

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that do not depend on the batch
ACTIVATIONS = {
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "GELUActivation": Activation.GELU,
    "GELU": Activation.GELU,
    "NewGELUActivation": Activation.GELU_TANH,
    "FastGELUActivation": Activation.GELU_TANH,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "BloomGelu": Activation.GELU_TANH,
    "ReLU": Activation.RELU,
    "ReLUSquaredActivation": Activation.RELU_SQUARED,
}
LESS_ONE = frozenset({"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "VaultGemmaRMSNorm"})  # gains are stored so
WIDE = frozenset({
    "Olmo2RMSNorm", "Olmo3RMSNorm", "FlexOlmoRMSNorm", "GptOssRMSNorm", "HeliumRMSNorm",
})  # gains are applied in float32  # fmt: skip


DEEPSEEK_ROUTERS = frozenset({
    "DeepseekV3TopkRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "AXK1TopkRouter", "Dots1TopkRouter",
    "SolarOpenTopkRouter",
})  # fmt: skip


class NotDescribed(Exception):
    """A part of a model that no field of a description stands for, in words."""


def read_norm(module: Any, like: Tensor | None = None) -> AnyNorm | None:
    """By the name of its class, which is transformers' or torch's. OLMo's has no gains: ones that are `like` others."""
    if module is None:
        return None
    name = type(module).__name__
    if name == "OlmoLayerNorm" and like is not None:
        return LayerNorm(torch.ones(module.normalized_shape, dtype=like.dtype, device=like.device), None, 1e-5)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    epsilon = float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0)
    if weight is None:
        raise NotDescribed("a norm without a weight")
    if name.endswith(("LayerNorm", "LayerNorm1P")):
        offset = 1.0 if name.endswith("1P") else 0.0
        return LayerNorm(weight.detach(), None if bias is None else bias.detach(), epsilon, offset)
    if name.endswith("RMSNorm"):
        return Norm(weight.detach(), epsilon, 1.0 if name in LESS_ONE else 0.0, name in LESS_ONE | WIDE)
    raise NotDescribed(f"a norm of type {name}")


def read_norm_behind(module: Any) -> Norm | None:
    """A norm of what is added to the hidden states."""
    norm = read_norm(module)
    if isinstance(norm, LayerNorm):
        raise NotDescribed("a layer norm behind attention or the MLP")
    return norm


def is_product(module: Any) -> bool:
    """Whether a module multiplies its inputs with a weight and does nothing else but add a bias, by its class."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def read_product(module: Any) -> Product:
    if not is_product(module):
        raise NotDescribed(f"a product of type {type(module).__name__}")
    product: Product = module
    return product


def read_activation(module: Any) -> Activation:
    activation = ACTIVATIONS.get(type(module).__name__)
    if activation is None:
        raise NotDescribed(f"the activation {type(module).__name__}")
    return activation


def read_gated_mlp(mlp: Any) -> Mlp:
    first = (read_product(mlp.gate_proj), read_product(mlp.up_proj))
    return Mlp(first, read_product(mlp.down_proj), read_activation(mlp.act_fn), True)


def read_fused_mlp(mlp: Any) -> Mlp:
    return Mlp((read_product(mlp.gate_up_proj),), read_product(mlp.down_proj), read_activation(mlp.activation_fn), True)


def read_plain_mlp(mlp: Any, first: str, second: str, activation: str) -> Mlp:
    products = read_product(getattr(mlp, first)), read_product(getattr(mlp, second))
    return Mlp(products[:1], products[1], read_activation(getattr(mlp, activation)), False)


def read_mlp_or_experts(block: Any, shared: str = "", shared_gate: str = "") -> Mlp | Experts:
    """A block of experts; a plain gated MLP where a layer has none."""
    if not hasattr(block, "experts"):
        return read_gated_mlp(block)
    experts, gate = block.experts, block.router if hasattr(block, "router") else block.gate
    correction = getattr(block, "e_score_correction_bias", None)  # MiniMax-M2's router is told
    route = gate if correction is None else partial(gate, e_score_correction_bias=correction)
    is_odd = not getattr(experts, "has_gate", True) or getattr(experts, "has_post_expert_norm", False)
    if is_odd or experts.is_concatenated == experts.is_transposed:
        raise NotDescribed("experts without a gate, with norms, or of another layout than is known")
    beside = getattr(block, shared) if shared else None
    return Experts(
        _checked(route, gate.weight),
        read_router(gate, correction),
        experts,
        _read_expert_activation(experts),
        shared=None if beside is None else read_gated_mlp(beside),
        shared_gate=read_product(getattr(block, shared_gate)) if shared_gate else None,
    )


def read_experts_and_identities(block: Any) -> Experts:
    """LongCat's: behind its experts stand some that give back what they are given, and cost nothing."""
    experts, first, second = block.experts, block.experts.gate_up_proj, block.experts.down_proj
    if first.shape[1:] != (2 * second.shape[2], second.shape[1]) or len(second) != experts.num_routed_experts:
        raise NotDescribed("experts of another layout than is known")
    # Before transformers 5.18 this router left its logits out.
    route = _checked(block.router, block.router.classifier.weight, ([True, True, False], [True, False]))
    return Experts(route, None, experts, read_activation(experts.act_fn), has_identities=True)


def _checked(route: Any, weight: Tensor, orders: Sequence[list[bool]] = ([True, True, False],)) -> Route:
    """Shares and chosen experts of a router. Those of one family answer in other orders in other versions of
    transformers; logits, shares, chosen experts is the one that is known, by which of them are fractions."""
    with torch.no_grad():
        answer = route(torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device))
    kinds = [each.is_floating_point() for each in answer] if isinstance(answer, tuple) else []
    if kinds not in orders:
        raise NotDescribed(
            f"{type(getattr(route, 'func', route)).__name__} does not answer with logits, shares and chosen experts"
        )
    return partial(_chosen, route)


def _chosen(route: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    shares, chosen = route(x)[-2:]
    return shares, chosen


def read_router(module: Any, correction: Tensor | None = None) -> Router | None:
    """By the name of its class; None for one that there are no words for, which is run as it is."""
    name, weight, most = type(module).__name__, module.weight.detach(), int(module.top_k)
    if name in ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter"):
        return Router(weight, None, most, Scoring.SOFTMAX, bool(module.norm_topk_prob))
    if name == "MiniMaxM2TopKRouter" and correction is not None:
        return Router(weight, None, most, Scoring.SIGMOID, True, correction=correction.detach(), keeps_wide=True)
    if name == "MixtralTopKRouter":
        return Router(weight, None, most, Scoring.SOFTMAX, True, keeps_wide=True)
    if name in ("GptOssTopKRouter", "GraniteMoeTopKRouter"):
        bias = getattr(module, "bias", None)
        return Router(weight, None if bias is None else bias.detach(), most, Scoring.CHOSEN)
    num_groups, top_groups = int(getattr(module, "num_group", 1) or 1), int(getattr(module, "topk_group", 1) or 1)
    if name in DEEPSEEK_ROUTERS:
        return Router(
            weight, None, most, Scoring.SIGMOID, bool(module.norm_topk_prob), float(module.routed_scaling_factor),
            module.e_score_correction_bias.detach(), num_groups, top_groups, is_wide=True,
        )  # fmt: skip
    if name == "DeepseekV2TopkRouter":
        groups = (1, 1) if module.topk_method == "greedy" else (num_groups, top_groups)
        factor = float(module.routed_scaling_factor)
        return Router(weight, None, most, Scoring.SOFTMAX, False, factor, None, *groups, is_wide=True)
    return None


def _read_expert_activation(experts: Any) -> Activation | None:
    """None for gpt-oss' clamped gate."""
    if hasattr(experts, "act_fn"):
        return read_activation(experts.act_fn)
    if (experts.limit, experts.alpha) != (SWIGLU_LIMIT, SWIGLU_SLOPE):
        raise NotDescribed(f"experts with a limit of {experts.limit} and a slope of {experts.alpha}")
    return None


def read_qkv(attention: Any, index: int) -> tuple[Product, ...]:
    """Queries, keys and values by three products, or by one in this order."""
    check_attention(attention, index)
    if hasattr(attention, "qkv_proj"):
        return (read_product(attention.qkv_proj),)
    return read_product(attention.q_proj), read_product(attention.k_proj), read_product(attention.v_proj)


def check_attention(attention: Any, index: int) -> None:
    if attention.layer_idx != index:
        raise NotDescribed(f"layer {index} writes the keys of layer {attention.layer_idx}")
    if not getattr(attention, "is_causal", True):
        raise NotDescribed("attention in both directions")


def read_head_norms(attention: Any, names: tuple[str, str] | None) -> dict[str, Any]:
    if names is None:
        return {}
    return {
        kind: read_norm(getattr(attention, name)) for kind, name in zip(("query_norm", "key_norm"), names, strict=True)
    }


def angle_tables(
    base: Any, config: Any, kinds: Sequence[str] = ("",), doubled: bool = False, halved: bool = False
) -> tuple[AngleTable, ...]:
    """A table for each kind of layers that rotates by angles of its own; see `_angles`."""
    ends = [_end_of_angles((config.rope_parameters[kind] if kind else config.rope_parameters) or {}) for kind in kinds]
    return tuple(partial(_angles, base, kind, doubled, halved, end) for kind, end in zip(kinds, ends, strict=True))


def _end_of_angles(rope: Any) -> int | None:
    """Where the frequencies of long-RoPE switch, which no text passes (`families.context_length`): a longer one would
    change the angles of keys that are written. Otherwise None."""
    kind, end = rope.get("rope_type", "default"), rope.get("original_max_position_embeddings")
    if kind == "longrope" and end:
        return int(end)
    if kind not in ROPE_TYPES:
        raise NotDescribed(f"rotary embedding of type {kind}")
    return None


@torch.no_grad()
def _angles(base: Any, kind: str, doubled: bool, halved: bool, end: int | None, count: int) -> Tensor:
    """The model's own cosines and sines; `doubled`: those of each angle stand side by side twice, not half by half;
    `halved`: each stands there once. DeepSeek-V2's are the parts of complex numbers. At `end` and behind it stand
    those before it, which nobody reads: they keep the table as long as the cache."""
    like = torch.zeros(1, dtype=base.dtype, device=base.device)
    positions = torch.arange(count, device=base.device)[None]
    if end is not None:
        positions = positions.clamp(max=end - 1)
    buffers = base.rotary_emb._buffers.copy()  # long-RoPE's call replaces one, which would look like a changed model
    angles = base.rotary_emb(like, positions, *([kind] if kind else []))
    base.rotary_emb._buffers.update(buffers)
    cos, sin = (angles.real, angles.imag) if isinstance(angles, Tensor) else angles
    if halved:
        cos, sin = (torch.cat([t] * 2, dim=-1) for t in (cos, sin))
    if doubled:
        cos, sin = (torch.cat([t[..., ::2]] * 2, dim=-1) for t in (cos, sin))
    return torch.cat([cos[0], sin[0]], dim=-1)


def decoder_of(config: Any, layers: Sequence[DecoderLayer], last_norm: Any, size: int, **more: Any) -> Decoder:
    if len(layers) != config.num_hidden_layers:
        raise NotDescribed(f"{len(layers)} layers where the configuration has {config.num_hidden_layers}")
    norm, heads = read_norm(last_norm, layers[0].attention.out.weight), int(config.num_attention_heads)
    assert norm is not None
    key_heads = int(more.pop("num_key_heads", None) or heads)
    return Decoder(heads, key_heads, size, tuple(layers), norm, **more)
