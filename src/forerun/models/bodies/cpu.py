"""Llama-like decoders on the CPU: all layers in one compiled call instead of a thousand small ones.

transformers' modules stay the definition of the model: this reads their weights where they lie, refuses whatever it
does not know (`why_not` says what), and is compared with them in the tests. Used where it measures faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun import ops
from forerun.cache.base import KeyValueCache
from forerun.config import Kernels
from forerun.kernels.cpu import stack
from forerun.kernels.cpu.memory import Floats, Ints
from forerun.kernels.cpu.threads import turn
from forerun.kernels.cpu.tile import LANES
from forerun.models import plain
from forerun.models.bodies import llama_like
from forerun.models.bodies.base import ForwardPass, FusedBody

TOKENS_AT_ONCE = 32  # more would push weights and activations out of the caches they are re-read from
GRAIN = 256  # rotary tables grow by this many positions


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps `model` (or a headless body) from being fused; None where nothing does."""
    if reason := llama_like.why_not(model):
        return reason
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"{model.dtype} on {model.device.type}, not float32 on the CPU".replace("torch.", "")
    config, size = model.config.get_text_config(decoder=True), model.base_model.layers[0].self_attn.head_dim
    for what, number in (("heads", size), ("hidden states", config.hidden_size), ("MLP", config.intermediate_size)):
        if number % LANES:
            return f"{what} of size {number}, no multiple of {LANES}"
    return llama_like.why_not_weights(model, torch.float32, model.device)


@dataclass
class CpuBody(FusedBody):
    """What lies below a model's head, run by `kernels.cpu.stack` over the ragged cache."""

    model: PreTrainedModel
    num_threads: int
    use: Kernels = Kernels.AUTO  # of the head's product
    parameters: list[list[Tensor | None]] = field(init=False)  # by layer, in the order of `stack.NAMES`

    def __post_init__(self) -> None:
        base, config = self.model.base_model, self.model.config.get_text_config(decoder=True)
        attention = base.layers[0].self_attn
        self.size: int = attention.head_dim
        self.width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.intermediate: int = config.intermediate_size
        self.scale = np.float32(attention.scaling)
        self.epsilon = np.float32(config.rms_norm_eps)
        self.windows = np.array(llama_like.windows(config), dtype=np.int64)
        self.parameters = [_of_layer(layer) for layer in base.layers]
        self._norm: Tensor = base.norm.weight
        self._flat = [*(p for layer in self.parameters for p in layer), self._norm]
        self._places = self._where()
        self._weights = np.zeros((len(base.layers), len(stack.NAMES)), dtype=np.int64)
        self._caches = np.zeros((len(base.layers), 2), dtype=np.int64)
        self._cos = self._sin = np.zeros((0, self.size), dtype=np.float32)
        self._scratch = np.zeros(0, dtype=np.float32)
        self._like = (torch.empty(0, self.kv_heads, self.size),) * 2

    @property
    def extra_bytes(self) -> int:
        """Memory beyond the model's weights, which are read where they lie: room to work, tables, addresses."""
        held = (self._scratch, self._cos, self._sin, self._weights, self._caches, self.windows)
        return sum(array.nbytes for array in held)

    def hidden(self, call: ForwardPass) -> Tensor:
        rows, cache, new = call.rows, call.cache, call.new
        x: Tensor = new.clone() if new.is_floating_point() else self.model.base_model.get_input_embeddings()(new)
        positions = np.concatenate([np.arange(p, p + c) for p, c in zip(rows.past, rows.counts, strict=True)])
        starts = np.repeat(np.array(rows.slots, dtype=np.int64) * cache.capacity, rows.counts)
        self._prepare(cache, rows.longest, min(len(positions), TOKENS_AT_ONCE))
        states = x.numpy()
        with turn(self.num_threads):
            for first in range(0, len(positions), TOKENS_AT_ONCE):
                part = slice(first, first + TOKENS_AT_ONCE)
                self._run(states[part], positions[part], starts[part])
        stack.norms(states, self._norm.data_ptr(), states, self.epsilon)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return ops.linear(hidden, head.weight, head.bias, self.use)

    def _run(self, x: Floats, positions: Ints, starts: Ints) -> None:
        stack.run_stack(
            x, self._weights, self._caches, self.windows, positions, starts, self._cos, self._sin,
            self.heads, self.kv_heads, self.intermediate, self.scale, self.epsilon, self.num_threads, self._scratch,
        )  # fmt: skip

    def _prepare(self, cache: KeyValueCache, longest: int, tokens: int) -> None:
        """Addresses as they are now (weights may have moved, the cache may have grown), and room to work."""
        if (places := self._where()) != self._places:
            self._check_weights()
            self._places = places
        self._weights.reshape(-1)[:] = places[:-1]
        for i in range(len(self.parameters)):
            layer = cache.layer(i, *self._like)
            self._caches[i] = layer.keys.data_ptr(), layer.values.data_ptr()
        if longest > len(self._cos):
            self._cos, self._sin = self._rotary(-(-longest // GRAIN) * GRAIN)
        need = stack.scratch_size(
            tokens, self.width, self.heads, self.kv_heads, self.size, self.intermediate, longest, self.num_threads
        )
        if need > len(self._scratch):
            self._scratch = np.empty(need + need // 4, dtype=np.float32)

    def _where(self) -> list[int]:
        return [0 if p is None else p.data_ptr() for p in self._flat]

    def _check_weights(self) -> None:
        """Weights that moved while rows are running may have become something else, at whose address nothing lies."""
        base = self.model.base_model
        reason = why_not(self.model)
        if reason is None:
            now = [*(p for layer in base.layers for p in _of_layer(layer)), base.norm.weight]
            if len(now) == len(self._flat) and all(p is known for p, known in zip(now, self._flat, strict=True)):
                return
        plain.refuse_change(reason or "its weights are other ones")

    def _rotary(self, count: int) -> tuple[Floats, Floats]:
        """The model's own cosines and sines of positions 0 .. count - 1."""
        cos, sin = self.model.base_model.rotary_emb(torch.zeros(1), torch.arange(count)[None])
        return cos[0].contiguous().numpy(), sin[0].contiguous().numpy()


def _of_layer(layer: Any) -> list[Tensor | None]:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [
        layer.input_layernorm.weight,
        *(p.weight for p in projections),
        layer.post_attention_layernorm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
        *norms,
        *(p.bias for p in projections),
    ]
