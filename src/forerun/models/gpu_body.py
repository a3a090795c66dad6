"""Llama-like decoders on a GPU: a few launches a layer, nothing waits for the host, so a CUDA graph can hold a pass.

transformers' modules stay the definition of the model: this reads their weights, of which q/k/v and gate/up are laid
side by side when it is made (the modules then hold views of them), refuses whatever it does not know (`why_not` says
what), and is compared with them in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun import kernels, ops
from forerun.cache.ragged import RaggedCache, ranges
from forerun.math.attention import Scale
from forerun.math.ragged_attention import Reach, reach_of
from forerun.math.skinny import Heads, Norm
from forerun.models import llama_like
from forerun.models.merging import merged
from forerun.types import RaggedRows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_SIZE = 256  # of a head
GRAIN = 1024  # rotary tables grow by this many positions


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps `model` (or a headless body) from being run by this; None where nothing does."""
    if reason := llama_like.why_not(model) or kernels.triton_missing(model.device.type):
        return reason
    if model.dtype not in DTYPES:
        return f"{model.dtype} is none of float32, float16, bfloat16".replace("torch.", "")
    size = model.base_model.layers[0].self_attn.head_dim
    if size > LARGEST_SIZE or size % 2:
        return f"heads of size {size}, odd or more than {LARGEST_SIZE}"

    def of_weight(weight: Tensor) -> str | None:
        if not weight.is_contiguous() or weight.dtype != model.dtype or weight.device != model.device:
            return f"not contiguous {model.dtype} on {model.device}"
        return None

    return llama_like.odd_module(model.base_model, of_weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer as they are multiplied."""

    qkv: Tensor  # [(Hq + 2 Hk) * D, H]
    qkv_bias: Tensor | None
    out: Tensor  # [H, Hq * D]
    out_bias: Tensor | None
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    before_attention: Norm
    before_mlp: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    window: int  # keys a token sees, 0 for all


class GpuBody:
    """What lies below a model's head, over the ragged cache, and the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        base, config = model.base_model, model.config.get_text_config(decoder=True)
        attention = base.layers[0].self_attn
        self.size: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.scale = Scale(attention.scaling)
        self.epsilon: float = config.rms_norm_eps
        self._windows = llama_like.windows(config)
        self._like = (model.base_model.norm.weight.new_empty(0, self.kv_heads, self.size),) * 2
        self._rotary = _tables(model, GRAIN)
        self._read_weights()

    def run(self, new: Tensor, positions: Tensor, addresses: Tensor, reach: Reach, cache: RaggedCache) -> Tensor:
        """Last hidden states [N, H], the final norm included, of token ids [N] or embeddings [N, H].

        `positions` [N] and `addresses` [N] (where keys go: slot * capacity + place) lie on the device, as do the
        tensors of `reach`, whose window is each layer's own affair. Keys and values of all layers are written.
        Tables cover the cache's capacity: a captured pass stays good for as long as the cache does not grow.
        """
        self._refresh(cache.capacity)
        x: Tensor = new if new.is_floating_point() else self.model.base_model.get_input_embeddings()(new)
        for index, layer in enumerate(self.layers):
            seen = reach if reach.window == layer.window else replace(reach, window=layer.window)
            pool = cache.room(index, *self._like)
            heads = Heads(self.heads, self.kv_heads, *self._rotary, positions, addresses, *pool.flat)
            mixed = ops.attend_ragged(self._query(x, layer, heads), *pool.by_head, seen, self.scale)
            x = ops.project(mixed.flatten(1), layer.out, layer.out_bias, residual=x)
            x = ops.project(ops.gate(x, layer.gate_up, layer.before_mlp), layer.down, residual=x)
        return ops.normed(x, self.norm)

    def run_rows(self, new: Tensor, rows: RaggedRows, cache: RaggedCache) -> Tensor:
        """The same over rows that the host knows."""
        device = new.device
        positions = ranges(rows.past, rows.counts).to(device)
        return self.run(new, positions, cache.addresses(rows).to(device), reach_of(rows, device), cache)

    def head(self, hidden: Tensor) -> Tensor:
        """[M, H] -> logits [M, V]."""
        head = self.model.get_output_embeddings()
        return ops.project(hidden, head.weight, head.bias)

    def _query(self, x: Tensor, layer: Layer, heads: Heads) -> Tensor:
        """Rotated queries [N, Hq, D]; keys and values are written."""
        if layer.query_norm is None or layer.key_norm is None:
            return ops.project_heads(x, layer.qkv, layer.qkv_bias, layer.before_attention, heads)
        made = ops.project(x, layer.qkv, layer.qkv_bias, layer.before_attention).unflatten(-1, (-1, self.size))
        query, keys, values = made.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, keys = ops.normed(query, layer.query_norm), ops.normed(keys, layer.key_norm)
        cos, sin = heads.cos[heads.positions], heads.sin[heads.positions]
        return ops.rotate_and_write(query, keys, values, cos, sin, heads.addresses, heads.key_pool, heads.value_pool)

    def _refresh(self, capacity: int) -> None:
        """Weights may have been replaced since the last pass, the cache may have grown."""
        if self._places != self._where():
            self._read_weights()
        if capacity > len(self._rotary[0]):
            self._rotary = _tables(self.model, -(-capacity // GRAIN) * GRAIN)

    def _read_weights(self) -> None:
        base = self.model.base_model
        self.layers = [self._layer(*pair) for pair in zip(base.layers, self._windows, strict=True)]
        self.norm = Norm(base.norm.weight.detach(), self.epsilon)
        self._parameters = [base.norm.weight, *base.layers.parameters()]
        self._places = self._where()

    def _where(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _layer(self, layer: Any, window: int) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = merged([attention.q_proj, attention.k_proj, attention.v_proj])
        out = attention.o_proj
        return Layer(
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out.weight.detach(),
            out_bias=None if out.bias is None else out.bias.detach(),
            gate_up=merged([mlp.gate_proj, mlp.up_proj])[0],
            down=mlp.down_proj.weight.detach(),
            before_attention=self._norm(layer.input_layernorm),
            before_mlp=self._norm(layer.post_attention_layernorm),
            query_norm=self._norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=self._norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            window=window,
        )

    def _norm(self, module: Any) -> Norm:
        return Norm(module.weight.detach(), self.epsilon)


@torch.no_grad()
def _tables(model: PreTrainedModel, count: int) -> tuple[Tensor, Tensor]:
    """The model's own cosines and sines [count, D] of positions 0 .. count - 1."""
    like = torch.zeros(1, dtype=model.dtype, device=model.device)
    cos, sin = model.base_model.rotary_emb(like, torch.arange(count, device=model.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()
