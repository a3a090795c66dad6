"""Whisper's decoder on the CPU: all layers in one compiled call, as `models.bodies.cpu` does for Llama-like models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation
from transformers.models.whisper.modeling_whisper import (
    WhisperAttention,
    WhisperDecoder,
    WhisperDecoderLayer,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperPositionalEmbedding,
)

from forerun import kernels, ops
from forerun.cache.base import KeyValueCache
from forerun.config import Kernels
from forerun.kernels.cpu.narrow import address, product_of
from forerun.models import plain
from forerun.models.bodies.base import ForwardPass, FusedBody

TOKENS_AT_ONCE = 32  # more would push weights and activations out of the caches they are re-read from
Shape = tuple[int, ...]


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model from being fused; None where nothing does."""
    config = model.config  # first of all: every model is asked for, and importing Numba takes a third of a second
    if config.model_type != "whisper" or config.activation_function != "gelu" or config.scale_embedding:
        return f"a {config.model_type}, not a Whisper as published"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"{model.dtype} on {model.device.type}, not float32 on the CPU".replace("torch.", "")
    if reason := kernels.why_not_numba():
        return reason
    from forerun.kernels.cpu.widen import LANES

    size, rest = divmod(config.d_model, config.decoder_attention_heads)
    for what, number in (("heads", size), ("hidden states", config.d_model), ("MLP", config.decoder_ffn_dim)):
        if number % LANES or rest:
            return f"{what} of size {number}, no multiple of {LANES}"
    if plain.has_global_hooks():
        return "forward hooks are registered for all modules"
    return next(_odd_parts(model), None)


def _odd_parts(model: Any) -> Iterator[str]:
    """Whatever would be skipped without a word: adapters, quantised layers, hooks, forwards of somebody's own."""
    if type(model) is not WhisperForConditionalGeneration:
        yield f"the model is a {type(model).__name__}, not a WhisperForConditionalGeneration"
        return
    decoder, config = model.get_decoder(), model.config
    around: list[tuple[str, Any, type[nn.Module], Shape | None]] = [
        ("the model", model, WhisperForConditionalGeneration, None),
        ("its model", model.model, WhisperModel, None),
        ("its head", model.get_output_embeddings(), nn.Linear, None),
        ("the decoder", decoder, WhisperDecoder, None),
        ("embed_positions", decoder.embed_positions, WhisperPositionalEmbedding, None),
        ("layer_norm", decoder.layer_norm, nn.LayerNorm, (config.d_model,)),
    ]
    for index, layer in enumerate(decoder.layers):
        around.append((f"layers.{index}", layer, WhisperDecoderLayer, None))
        around += [(f"layers.{index}.{name}", *rest) for name, *rest in _inside(layer, config)]
    for name, module, kind, shape in around:
        reason = plain.why_not_module(module, kind)
        if reason is None and shape is not None:
            reason = _odd_weights(name, module, shape, decoder.layer_norm)
        if reason is not None:
            yield f"{name} {reason}"
    if any(layer.self_attn.layer_idx != index for index, layer in enumerate(decoder.layers)):
        yield "layers are not in their order"
    scales = {attention.scaling for layer in decoder.layers for attention in (layer.self_attn, layer.encoder_attn)}
    if scales != {(config.d_model // config.decoder_attention_heads) ** -0.5}:
        yield "a layer scales its attention by a factor of its own"


def _inside(layer: Any, config: Any) -> Iterator[tuple[str, Any, type[nn.Module], Shape | None]]:
    """Name, module, class and weight's shape of everything in a layer."""
    width, inner = config.d_model, config.decoder_ffn_dim
    for name in ("self_attn", "encoder_attn"):
        attention = getattr(layer, name)
        yield name, attention, WhisperAttention, None
        yield f"{name}_layer_norm", getattr(layer, f"{name}_layer_norm"), nn.LayerNorm, (width,)
        if type(attention) is WhisperAttention:
            # Cross-attention's keys and values are made by its own modules, whatever these are.
            for part in ("q_proj", "out_proj", *(("k_proj", "v_proj") if name == "self_attn" else ())):
                yield f"{name}.{part}", getattr(attention, part), nn.Linear, (width, width)
    yield "final_layer_norm", layer.final_layer_norm, nn.LayerNorm, (width,)
    yield "activation_fn", layer.activation_fn, GELUActivation, None
    yield "fc1", layer.fc1, nn.Linear, (inner, width)
    yield "fc2", layer.fc2, nn.Linear, (width, inner)


def _odd_weights(name: str, module: Any, shape: Shape, final: nn.LayerNorm) -> str | None:
    """All but the keys' projection have a bias, and all norms one epsilon."""
    here = torch.float32, torch.device("cpu")
    if reason := plain.why_not_weight(module.weight, shape, *here):
        return f"has a weight that {reason}"
    if name.endswith("k_proj"):
        return None if module.bias is None else "has a bias"
    if reason := plain.why_not_weight(module.bias, shape[:1], *here):
        return f"has a bias that {reason}"
    if isinstance(module, nn.LayerNorm) and module.eps != final.eps:
        return "has an epsilon of its own"
    return None


class WhisperBody(FusedBody):
    """What lies below a Whisper's head, run by `kernels.cpu.decoder_stack` over the ragged caches."""

    def __init__(self, model: PreTrainedModel, use: Kernels = Kernels.AUTO) -> None:
        from forerun.kernels.cpu import decoder_stack
        from forerun.kernels.cpu.threads import most_threads

        self.stack, self.num_threads = decoder_stack, most_threads()
        self.decoder: Any = model.get_decoder()
        config = model.config
        self.use = use  # of the head's product
        self.width, self.heads = config.d_model, config.decoder_attention_heads
        self.size, self.middle = self.width // self.heads, config.decoder_ffn_dim
        self.scale, self.epsilon = np.float32(self.size**-0.5), np.float32(self.decoder.layer_norm.eps)
        self.model, self._norm = model, self.decoder.layer_norm
        self.parameters = [_of_layer(layer) for layer in self.decoder.layers]
        self._places = self._where()
        self._products = np.array([[product_of(weight) for weight in layer] for layer in self.parameters])
        self._like = (torch.empty(0, self.heads, self.size, dtype=torch.float32),) * 2

    def hidden(self, call: ForwardPass) -> Tensor:
        assert call.sources is not None, "a Whisper reads a source"
        rows, cache, tokens, sources = call.rows, call.cache, call.new, call.sources.cache
        positions = np.concatenate([np.arange(p, p + c) for p, c in zip(rows.past, rows.counts, strict=True)])
        starts = np.repeat(np.array(rows.slots, dtype=np.int64) * cache.capacity, rows.counts)
        owners = np.repeat(np.arange(len(rows.slots)), rows.counts)
        x: Tensor = self.decoder.embed_tokens(tokens) + self.decoder.embed_positions.weight[torch.from_numpy(positions)]
        states = x.detach().numpy()
        for first in range(0, len(positions), TOKENS_AT_ONCE):
            part = slice(first, first + TOKENS_AT_ONCE)
            runs = _runs(owners[part], [(slot * sources.capacity, length) for slot, length in call.sources.places])
            self._run(states[part], positions[part], starts[part], runs, cache, sources)
        norm = self._norm
        self.stack.norms(states, norm.weight.data_ptr(), norm.bias.data_ptr(), states, self.epsilon)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return ops.linear(hidden, head.weight, head.bias, self.use)

    def _run(
        self, x: Any, positions: Any, starts: Any, runs: Any, cache: KeyValueCache, sources: KeyValueCache
    ) -> None:
        from forerun.kernels.cpu.attention import MOST_QUERIES
        from forerun.kernels.cpu.threads import turn

        threads, tokens = self.num_threads, len(positions)
        longest = max(int(positions.max()) + 1, int(runs[:, 3].max()))
        weights = np.stack([np.array(self._checked()), self._products], axis=-1)
        pools = [cache.layer(i, *self._like) for i in range(len(weights))]
        read = [sources.layers[i] for i in range(len(weights))]

        def room(*shape: int) -> Any:
            return np.empty(shape, dtype=np.float32)

        with turn(threads):
            self.stack.run_decoder(
                x, weights,
                np.array([[p.keys.data_ptr(), p.values.data_ptr()] for p in pools]),
                np.array([[p.keys.data_ptr(), p.values.data_ptr()] for p in read]),
                positions, starts, runs,
                room(threads, tokens, self.width), room(threads, 2, tokens, self.size), room(tokens, self.width),
                room(tokens, self.width), room(tokens, self.middle), room(threads, MOST_QUERIES * longest),
                self.scale, self.epsilon,
            )  # fmt: skip

    def _where(self) -> list[list[int]]:
        return [[address(weight) for weight in layer] for layer in (*self.parameters, [*_both(self._norm)])]

    def _checked(self) -> list[list[int]]:
        """Where each layer's weights are now. Those that moved may have become something else."""
        places = self._where()
        if places != self._places:
            if reason := why_not(self.model):
                plain.refuse_change(reason)
            now = [p for layer in self.decoder.layers for p in _of_layer(layer)]
            if any(p is not known for p, known in zip(now, chain(*self.parameters), strict=True)):
                plain.refuse_change("its weights are other ones")
            self._places = places
        return places[:-1]


def _runs(owners: Any, read: Sequence[tuple[int, int]]) -> Any:
    """[R, 4]: tokens of one row, side by side, and where their source lies."""
    runs = []
    for owner in dict.fromkeys(owners.tolist()):
        places = np.flatnonzero(owners == owner)
        runs.append((places[0], places[-1] + 1, *read[owner]))
    return np.array(runs, dtype=np.int64)


def _of_layer(layer: Any) -> list[Tensor]:
    """In the order of `decoder_stack.NAMES`."""
    attention, cross = layer.self_attn, layer.encoder_attn
    return [
        *_both(layer.self_attn_layer_norm), *_both(attention.q_proj), attention.k_proj.weight,
        *_both(attention.v_proj), *_both(attention.out_proj),
        *_both(layer.encoder_attn_layer_norm), *_both(cross.q_proj), *_both(cross.out_proj),
        *_both(layer.final_layer_norm), *_both(layer.fc1), *_both(layer.fc2),
    ]  # fmt: skip


def _both(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight, module.bias
