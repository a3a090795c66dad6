"""Whisper's decoder on the CPU: all layers in one compiled call, as `models.fused` does for Llama-like models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun import kernels
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.types import RaggedRows, Source

TOKENS_AT_ONCE = 32  # more would push weights and activations out of the caches they are re-read from
TIMED, PAST = (1, 4), 16  # new tokens of the passes that are timed, and keys behind them


def whisper_body(model: PreTrainedModel, use: Kernels) -> FusedWhisper | None:
    """The fused decoder of `model`, where there is one and it is wanted."""
    if use is Kernels.OFF or why_not(model) is not None:
        return None
    return FusedWhisper(model) if use is Kernels.ON or is_faster(model) else None


def is_faster(model: PreTrainedModel) -> bool:
    """Whether the fused decoder beats transformers' modules on this machine; timed once for a shape."""
    from forerun.kernels.cpu.measured import remembered
    from forerun.kernels.cpu.threads import most_threads

    config = model.config
    shape = f"{config.decoder_layers}x{config.d_model}x{config.decoder_ffn_dim} over {config.max_source_positions}"
    times = remembered(f"whisper body {shape} threads {most_threads()}", lambda: measured(model))
    return bool(times["fused"] < times["modules"])


def measured(model: PreTrainedModel) -> dict[str, float]:
    """Seconds of a plain step and of a short draft, without the head."""
    from forerun.kernels.cpu.measured import seconds

    ways = {"fused": _stepper(model, FusedWhisper(model)), "modules": _stepper(model, None)}
    return seconds(ways)


def _stepper(model: PreTrainedModel, body: FusedWhisper | None) -> Callable[[], None]:
    from forerun.models.seq2seq import Seq2SeqScorer

    config = model.config
    scorer = Seq2SeqScorer(model, use=Kernels.OFF)
    scorer.body = body
    scorer.admit(0)
    scorer.read(0, Source(states=torch.rand(config.max_source_positions, config.d_model)))
    past = min(PAST, config.max_target_positions // 2)
    scorer.feed([0], [[0] * past])

    def step() -> None:
        for tokens in TIMED:
            scorer.feed([0], [[0] * min(tokens, past)])
            scorer.rewind([0], [past])

    return step


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model from being fused; None where nothing does."""
    if reason := kernels.missing():
        return reason
    from forerun.kernels.cpu import linear
    from forerun.kernels.cpu.tile import LANES

    config = model.config
    if config.model_type != "whisper" or config.activation_function != "gelu" or config.scale_embedding:
        return f"a {config.model_type}, not a Whisper as published"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"{model.dtype} on {model.device.type}, not float32 on the CPU".replace("torch.", "")
    if config.d_model // config.decoder_attention_heads % LANES:
        return f"heads of size {config.d_model // config.decoder_attention_heads}, no multiple of {LANES}"
    for name, module in model.get_decoder().layers.named_modules():
        if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
            return f"{name} is wrapped"
        if isinstance(module, nn.Linear) and (type(module) is not nn.Linear or not linear.fits(module.weight)):
            return f"{name} is {type(module).__name__} of shape {tuple(module.weight.shape)}"
    return None


class FusedWhisper:
    """What lies below a Whisper's head, run by `kernels.cpu.decoder_stack` over the ragged caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        from forerun.kernels.cpu import decoder_stack
        from forerun.kernels.cpu.threads import most_threads

        self.stack, self.num_threads = decoder_stack, most_threads()
        self.decoder: Any = model.get_decoder()
        config = model.config
        self.hidden, self.heads = config.d_model, config.decoder_attention_heads
        self.size, self.middle = self.hidden // self.heads, config.decoder_ffn_dim
        self.scale, self.epsilon = np.float32(self.size**-0.5), np.float32(self.decoder.layer_norm.eps)
        self.parameters = [_of_layer(layer) for layer in self.decoder.layers]

    def run_sources(
        self,
        tokens: Tensor,  # [N]
        rows: RaggedRows,
        cache: RaggedCache,
        sources: RaggedCache,
        read: Sequence[tuple[int, int]],  # of each row, its source's slot and length
    ) -> Tensor:  # [N, H]
        """Last hidden states, the final norm included; keys and values of all layers are written."""
        positions = np.concatenate([np.arange(p, p + c) for p, c in zip(rows.past, rows.counts, strict=True)])
        starts = np.repeat(np.array(rows.slots, dtype=np.int64) * cache.capacity, rows.counts)
        owners = np.repeat(np.arange(len(rows.slots)), rows.counts)
        x: Tensor = self.decoder.embed_tokens(tokens) + self.decoder.embed_positions.weight[torch.from_numpy(positions)]
        states = x.detach().numpy()
        for first in range(0, len(positions), TOKENS_AT_ONCE):
            part = slice(first, first + TOKENS_AT_ONCE)
            runs = _runs(owners[part], [(slot * sources.capacity, length) for slot, length in read])
            self._run(states[part], positions[part], starts[part], runs, cache, sources)
        norm = self.decoder.layer_norm
        self.stack.norms(states, norm.weight.data_ptr(), norm.bias.data_ptr(), states, self.epsilon)
        return x

    def _run(self, x: Any, positions: Any, starts: Any, runs: Any, cache: RaggedCache, sources: RaggedCache) -> None:
        from forerun.kernels.cpu.attention import MOST_QUERIES
        from forerun.kernels.cpu.threads import turn

        threads, tokens = self.num_threads, len(positions)
        longest = max(int(positions.max()) + 1, int(runs[:, 3].max()))
        weights = np.array([[p.data_ptr() for p in layer] for layer in self.parameters])
        pools = [cache.layer(i, self.heads, self.size) for i in range(len(weights))]
        read = [sources.layers[i] for i in range(len(weights))]

        def room(*shape: int) -> Any:
            return np.empty(shape, dtype=np.float32)

        with turn(threads):
            self.stack.run_decoder(
                x, weights,
                np.array([[p.keys.data_ptr(), p.values.data_ptr()] for p in pools]),
                np.array([[p.keys.data_ptr(), p.values.data_ptr()] for p in read]),
                positions, starts, runs,
                room(threads, tokens, self.hidden), room(threads, 2, tokens, self.size), room(tokens, self.hidden),
                room(tokens, self.hidden), room(tokens, self.middle), room(threads, MOST_QUERIES * longest),
                self.scale, self.epsilon,
            )  # fmt: skip


def _runs(owners: Any, read: Sequence[tuple[int, int]]) -> Any:
    """[R, 4]: tokens of one row, side by side, and where their source lies."""
    found = []
    for owner in dict.fromkeys(owners.tolist()):
        places = np.flatnonzero(owners == owner)
        found.append((places[0], places[-1] + 1, *read[owner]))
    return np.array(found, dtype=np.int64)


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
