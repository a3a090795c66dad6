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
from forerun.cache.base import KeyValueCache, ranges
from forerun.math.attention import Scale
from forerun.math.ragged_attention import Reach, reach_of
from forerun.math.skinny import Heads, Norm
from forerun.models import plain
from forerun.models.bodies import llama_like
from forerun.models.bodies.base import ForwardPass, FusedBody
from forerun.models.bodies.merging import merged

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_SIZE = 256  # of a head
GRAIN = 1024  # the table of angles grows by this many positions


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps `model` (or a headless body) from being run by this; None where nothing does."""
    if reason := llama_like.why_not(model) or kernels.why_not_triton(model.device.type):
        return reason
    if model.dtype not in DTYPES:
        return f"{model.dtype} is none of float32, float16, bfloat16".replace("torch.", "")
    size = model.base_model.layers[0].self_attn.head_dim
    if size > LARGEST_SIZE or size % 2:
        return f"heads of size {size}, odd or more than {LARGEST_SIZE}"

    if reason := llama_like.why_not_weights(model, model.dtype, model.device):
        return reason
    return "layers share weights" if _shares_weights(model) else None


def _shares_weights(model: PreTrainedModel) -> bool:
    """Whether a weight is multiplied with in two places: it can lie side by side with the others of one alone."""
    places = [parameter.data_ptr() for layer in model.base_model.layers for parameter in layer.parameters()]
    return len(set(places)) < len(places)


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


class GpuBody(FusedBody):
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
        self._has_head_norms = llama_like.FAMILIES[config.model_type].head_norms
        self._like = (model.base_model.norm.weight.new_empty(0, self.kv_heads, self.size),) * 2
        self._rotary = _table(model, GRAIN)
        self._read_weights()

    def hidden_at(
        self, new: Tensor, positions: Tensor, addresses: Tensor, reach: Reach, cache: KeyValueCache
    ) -> Tensor:
        """Last hidden states [N, H], the final norm included, of token ids [N] or embeddings [N, H].

        `positions` [N] and `addresses` [N] (where keys go in a layer's `flat`) lie on the device, as do the
        tensors of `reach`, whose window is each layer's own affair. Keys and values of all layers are written.
        The table of angles covers the cache's capacity: a captured pass is good for as long as the cache does not move.
        """
        self._refresh(cache.capacity)
        x: Tensor = new if new.is_floating_point() else self.model.base_model.get_input_embeddings()(new)
        cos, sin = self._rotary[positions].chunk(2, dim=-1)
        change: Tensor | None = None  # what is yet to be added to x
        for index, layer in enumerate(self.layers):
            seen = reach if reach.window == layer.window else replace(reach, window=layer.window)
            pool = cache.layer(index, *self._like)
            heads = Heads(self.heads, self.kv_heads, cos, sin, addresses, *pool.flat)
            x, query = self._query(x, change, layer, heads)
            mixed = ops.attend_ragged(query, *pool.by_head, seen, self.scale).flatten(1)
            x, change = self._mlp(x, mixed, layer)
        return ops.normed(x, self.norm) if change is None else ops.added(x, change, self.norm)[1]

    def hidden(self, call: ForwardPass) -> Tensor:
        rows, cache, device = call.rows, call.cache, call.new.device
        positions, reach = ranges(rows.past, rows.counts).to(device), reach_of(rows, device, table=cache.table)
        return self.hidden_at(call.new, positions, cache.addresses(rows).to(device), reach, cache)

    def head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return ops.project(hidden, head.weight, head.bias)

    def head_into(self, out: Tensor, hidden: Tensor) -> None:
        """The same, left in `out` [M, V]."""
        head = self.model.get_output_embeddings()
        ops.project_into(out, hidden, head.weight, head.bias)

    def _query(self, x: Tensor, change: Tensor | None, layer: Layer, heads: Heads) -> tuple[Tensor, Tensor]:
        """x, all changes added, and rotated queries [N, Hq, D]; keys and values are written.

        One row is normed by every program of a product for itself; for more there is a launch of its own.
        """
        norm: Norm | None = layer.before_attention
        inner = x
        if change is not None and norm is not None:
            (x, inner), norm = ops.added(x, change, norm), None
        if layer.query_norm is None or layer.key_norm is None:
            return x, ops.project_heads(inner, layer.qkv, layer.qkv_bias, norm, heads)
        made = ops.project(inner, layer.qkv, layer.qkv_bias, norm).unflatten(-1, (-1, self.size))
        query, keys, values = made.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, keys = ops.normed(query, layer.query_norm), ops.normed(keys, layer.key_norm)
        return x, ops.rotate_and_write(query, keys, values, *heads.tensors)

    def _mlp(self, x: Tensor, mixed: Tensor, layer: Layer) -> tuple[Tensor, Tensor | None]:
        """x after attention's output and the MLP; of more than one row the MLP's share is still to be added."""
        if len(x) == 1:
            x = ops.project(mixed, layer.out, layer.out_bias, residual=x)
            return ops.project(ops.gate(x, layer.gate_up, layer.before_mlp), layer.down, residual=x), None
        x, inner = ops.added(x, ops.project(mixed, layer.out, layer.out_bias), layer.before_mlp)
        return x, ops.project(ops.gate(inner, layer.gate_up), layer.down)

    def _refresh(self, capacity: int) -> None:
        """Weights may have moved since the last pass, the cache may have grown."""
        if self._places != self._where():
            if reason := why_not(self.model):
                plain.refuse_change(reason)
            self._read_weights()
        if capacity > len(self._rotary):
            self._rotary = _table(self.model, -(-capacity // GRAIN) * GRAIN)

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
            query_norm=self._norm(attention.q_norm) if self._has_head_norms else None,
            key_norm=self._norm(attention.k_norm) if self._has_head_norms else None,
            window=window,
        )

    def _norm(self, module: Any) -> Norm:
        return Norm(module.weight.detach(), self.epsilon)


@torch.no_grad()
def _table(model: PreTrainedModel, count: int) -> Tensor:
    """The model's own cosines and sines of positions 0 .. count - 1, side by side: [count, 2 D]."""
    like = torch.zeros(1, dtype=model.dtype, device=model.device)
    cos, sin = model.base_model.rotary_emb(like, torch.arange(count, device=model.device)[None])
    return torch.cat([cos[0], sin[0]], dim=-1)
