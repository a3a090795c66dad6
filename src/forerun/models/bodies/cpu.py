"""Described decoders on the CPU: all layers in one compiled call instead of a thousand small ones.

transformers' modules stay the definition of the model: `bodies.readers` describes what they do, and this runs the
description. Weights are read where they lie. What is not described is refused (`why_not` says what). Used where it
measures faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun import ops
from forerun.cache.base import KeyValueCache
from forerun.config import Kernels
from forerun.kernels.cpu import experts, norms, stack
from forerun.kernels.cpu.memory import Floats, Ints
from forerun.kernels.cpu.narrow import address, is_in_panels, is_narrow, product_of, row_address
from forerun.kernels.cpu.threads import turn
from forerun.kernels.cpu.widen import LANES
from forerun.kernels.scaled import ScaledWeight
from forerun.math import latent
from forerun.math.experts import without_identities
from forerun.math.panels import PANEL
from forerun.math.skinny import LayerNorm, gated
from forerun.models.bodies import readers
from forerun.models.bodies.base import ForwardPass
from forerun.models.bodies.described import DescribedBody
from forerun.models.bodies.description import (
    AnyNorm,
    Attention,
    Decoder,
    DecoderLayer,
    Experts,
    LatentAttention,
    Mlp,
)
from forerun.models.bodies.merging import Product, by_outputs, expert_weights
from forerun.types import RaggedRows

TOKENS_AT_ONCE = 128  # weights are read once for so many; a prompt's activations then still fit the caches
LINE = 16  # floats of a cache line
GRAIN = 256  # tables of angles grow by this many positions


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps `model` (or a headless body) from being fused; None where nothing does."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"{model.dtype} on {model.device.type}, not float32 on the CPU".replace("torch.", "")
    if any(isinstance(weight, ScaledWeight) for weight in model.parameters()):
        return "its weights are rounded for a GPU"
    if reason := readers.why_not(model):
        return reason
    return next(odd_sizes(readers.describe(model)), None)


def odd_sizes(decoder: Decoder) -> Iterator[str]:
    """Vector instructions take whole registers."""
    sizes = {"heads": decoder.head_size, "hidden states": decoder.norm.weight.shape[-1]}
    for layer in decoder.layers:
        if isinstance(layer.attention, LatentAttention) and is_narrow(layer.attention.up.weight):
            yield "latents that go through a weight stored narrow"
        mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
        sizes |= {} if mlp is None else {"MLP": readers.shape_of(mlp.second)[1]}
        if (block := layer.experts) is not None:
            sizes |= {"experts": min(block.module.down_proj.shape[1:])}
        whole = PANEL if any(map(is_in_panels, _divided(layer))) else LANES
        for what, number in sizes.items():
            if number % whole:
                yield f"{what} of size {number}, no multiple of {whole}"


def _divided(layer: DecoderLayer) -> Iterator[Tensor]:
    """Weights of which some rows are multiplied by themselves: one head's, gate's or up's."""
    products = layer.attention.qkv if isinstance(layer.attention, Attention) else ()
    inner = layer.mlp.first if isinstance(layer.mlp, Mlp) else ()
    return (product.weight for product in (*products, *inner))


class CpuBody(DescribedBody):
    """What lies below a model's head, run by `kernels.cpu.stack` over the ragged cache."""

    _angles: Floats  # [tables, positions, 2 T]

    def __init__(self, model: PreTrainedModel, num_threads: int, use: Kernels = Kernels.AUTO) -> None:
        self.num_threads = num_threads
        self.use = use  # of the head's product
        self._scratch = np.zeros(0, dtype=np.float32)
        super().__init__(model)

    @property
    def extra_bytes(self) -> int:
        """Memory beyond the model's weights, which are read where they lie: room to work, tables, addresses."""
        held = (self._scratch, self._angles, self._layers, self._heads)
        return sum(array.nbytes for array in held)

    def hidden(self, call: ForwardPass) -> Tensor:
        rows, cache = call.rows, call.cache
        self._check_weights()
        positions, starts = places_of(rows, cache)
        x = self._embedded(call.new, torch.from_numpy(positions))
        x = x.clone() if x is call.new else x
        self._prepare(cache, rows.longest, min(len(positions), TOKENS_AT_ONCE))
        states = x.numpy()
        with turn(self.num_threads):
            for first in range(0, len(positions), TOKENS_AT_ONCE):
                part = slice(first, first + TOKENS_AT_ONCE)
                self._run(x[part], positions[part], starts[part])
        norms.norms(states, self._norm, states)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return self._scaled(ops.linear(hidden, head.weight, head.bias, self.use))

    def _run(self, x: Tensor, positions: Ints, starts: Ints) -> None:
        """All layers, in place; what latent attention and experts do, between two of the compiled calls."""
        begin, late = 0, None
        for end in self._pauses:
            if self.decoder.value_size is not None:
                self._add_latents(x, begin, positions, starts)
            spec = self.decoder.layers[begin].late_experts
            change = None if spec is None else self._from_experts(x, begin, spec)
            self._run_layers(x.numpy(), positions, starts, begin, end)
            self._add_experts(x, end - 1)
            if late is not None:
                x += late
            begin, late = end, change

    def _run_layers(
        self, x: Floats, positions: Ints, starts: Ints, begin: int, end: int, only: int = stack.WHOLE
    ) -> None:
        spec = self.decoder
        stack.run_stack(
            x, self._layers[begin:end], self._heads[begin:end], positions, starts, self._angles, spec.is_interleaved,
            spec.num_heads, spec.num_key_heads, spec.head_size, self.num_threads, self._scratch,
            only,
        )  # fmt: skip

    def _add_latents(self, x: Tensor, index: int, positions: Ints, starts: Ints) -> None:
        """x += what a layer's latent attention makes of its norm."""
        layer, inner = self.decoder.layers[index], torch.empty_like(x)
        spec, pool = layer.attention, self._pools[index]
        assert isinstance(spec, LatentAttention)
        norms.norms(x.numpy(), self._layers[index]["before_attention"], inner.numpy())
        cos, sin = torch.from_numpy(self._angles[spec.angles][positions]).chunk(2, dim=-1)
        projected = torch.cat([self._product(inner, part) for part in spec.down], dim=-1)
        query = latent.write_latents(
            projected, spec.query_norm, spec.latent_norm, cos, sin, torch.from_numpy(starts + positions), *pool.flat,
            spec.heads,
        )  # fmt: skip
        query = query if spec.query_up is None else self._product(query, spec.query_up)
        query, turning = latent.absorb(query, spec.up.weight, cos, sin, spec.heads)
        mixed, (latents, shared_keys) = torch.empty_like(query), (each[:, 0] for each in pool.flat)
        for part in _rows(starts):
            seen = slice(starts[part.start], starts[part.start] + positions[part.stop - 1] + 1)
            mixed[part] = latent.attend_row(query[part], turning[part], latents[seen], shared_keys[seen], spec.scale)
        x += layer.multiplier * self._product(latent.expand(mixed, spec.up.weight, spec.heads), spec.out)

    def _product(self, x: Tensor, product: Product) -> Tensor:
        return ops.linear(x, by_outputs(product), product.bias, self.use)

    def _add_experts(self, x: Tensor, index: int) -> None:
        """x += what a layer's experts make of its norm, where it has some in the place of an MLP."""
        layer = self.decoder.layers[index]
        if not isinstance(layer.mlp, Experts):
            return
        change = self._from_experts(x, index, layer.mlp)
        if layer.after_mlp is not None:
            norms.norms(change.numpy(), self._layers[index]["after_mlp"], change.numpy())
        x += layer.multiplier * change

    def _from_experts(self, x: Tensor, index: int, spec: Experts) -> Tensor:
        """What experts make of the norm before a layer's MLP."""
        inner, weights = torch.empty_like(x), self._experts[index]
        norms.norms(x.numpy(), self._layers[index]["before_mlp"], inner.numpy())
        shares, chosen = spec.route(inner)
        identities = None
        if spec.has_identities:
            shares, chosen, identities = without_identities(shares, chosen, len(weights.second))
        outputs = experts.run_experts(inner, chosen, shares, weights, self.num_threads)
        if identities is not None:
            outputs = identities.added(outputs, inner)
        if spec.shared is not None:
            pairs = torch.cat([self._product(inner, part) for part in spec.shared.first], dim=-1)
            other = self._product(gated(pairs, spec.shared.activation), spec.shared.second)
            outputs += other if spec.shared_gate is None else torch.sigmoid(spec.shared_gate(inner)) * other
        return outputs

    def _prepare(self, cache: KeyValueCache, longest: int, tokens: int) -> None:
        """Addresses of the cache as they are now, and room to work."""
        spec = self.decoder
        self._pools = [cache.layer(index, *self._like) for index in range(len(spec.layers))]
        for entry, pool in zip(self._layers, self._pools, strict=True):
            entry["keys"], entry["values"] = pool.keys.data_ptr(), pool.values.data_ptr()
        if spec.tables and longest > self._angles.shape[1]:
            count = -(-longest // GRAIN) * GRAIN
            self._angles = np.ascontiguousarray(np.stack([table(count).numpy() for table in spec.tables]))
        if not tokens:  # of whoever has room of its own
            return
        need = stack.scratch_size(
            tokens, spec.norm.weight.shape[-1], spec.num_heads, spec.num_key_heads, spec.head_size,
            int(self._layers["inner"].max()), longest, self.num_threads,
        )  # fmt: skip
        if need > len(self._scratch):
            self._scratch = _aligned(need + need // 4)

    def _why_not(self) -> str | None:
        return why_not(self.model)

    def _take_weights(self) -> None:
        """Addresses; `decoder` and the model hold the tensors."""
        spec = self.decoder
        self._angles = np.zeros((1, 0, 0), dtype=np.float32)
        self._layers = np.zeros(len(spec.layers), dtype=stack.LAYER)
        self._heads = np.stack([_heads(layer.attention, spec) for layer in spec.layers])
        for entry, layer in zip(self._layers, spec.layers, strict=True):
            _fill(entry, layer, spec)
        self._experts = {
            index: expert_weights(block.module, block.activation)
            for index, layer in enumerate(spec.layers)
            if (block := layer.experts) is not None
        }
        everywhere = range(1, len(spec.layers) + 1)
        behind = {index + 1 for index in self._experts}
        self._pauses = everywhere if spec.value_size is not None else sorted({*behind, len(spec.layers)})
        self._norm = np.zeros(1, dtype=norms.NORM)[0]
        _fill_norm(self._norm, spec.norm)
        sizes = spec.head_size, spec.value_size or spec.head_size
        self._like = tuple(torch.empty(0, spec.num_key_heads, size, dtype=torch.float32) for size in sizes)


def places_of(rows: RaggedRows, cache: KeyValueCache) -> tuple[Ints, Ints]:
    """Of each new token its position, and where its row begins in the cache, [N] each."""
    positions = np.concatenate([np.arange(p, p + c) for p, c in zip(rows.past, rows.counts, strict=True)])
    return positions, np.repeat(np.array(rows.slots, dtype=np.int64) * cache.capacity, rows.counts)


def _aligned(count: int) -> Floats:
    """Room from the beginning of a cache line on: vectors that lie across two lines are read twice."""
    room = np.empty(count + LINE, dtype=np.float32)
    first = -room.ctypes.data // 4 % LINE
    return room[first : first + count]


def _rows(starts: Ints) -> Iterator[slice]:
    """Tokens that stand side by side in one row."""
    edges = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
    return (slice(*pair) for pair in pairwise(edges))


def _heads(attention: Attention | LatentAttention, spec: Decoder) -> Ints:
    """[heads + 2 key heads, 3] addresses of each head's weight rows, product and bias, queries, keys, values."""
    if isinstance(attention, LatentAttention):
        return np.zeros((spec.num_heads + 2 * spec.num_key_heads, 3), dtype=np.int64)  # never looked at
    heads = []
    for product in attention.qkv:
        weight, bias = by_outputs(product), product.bias
        for first in range(0, len(weight), spec.head_size):
            heads.append((row_address(weight, first), product_of(weight), row_address(bias, first)))
    order = range(len(heads)) if attention.head_order is None else attention.head_order
    return np.array([heads[head] for head in order], dtype=np.int64)


def _fill(entry: Any, layer: DecoderLayer, spec: Decoder) -> None:
    before_mlp = layer.before_attention if layer.is_parallel and layer.before_mlp is None else layer.before_mlp
    for name, norm in (
        ("before_attention", layer.before_attention), ("after_attention", layer.after_attention),
        ("before_mlp", before_mlp), ("after_mlp", layer.after_mlp),
    ):  # fmt: skip
        if norm is not None:
            _fill_norm(entry[name], norm)
    entry["is_parallel"], entry["multiplier"] = layer.is_parallel, layer.multiplier
    if isinstance(layer.attention, Attention):
        _fill_attention(entry, layer.attention, spec)
    if isinstance(layer.mlp, Mlp):
        _fill_mlp(entry, layer.mlp)


def _fill_attention(entry: Any, attention: Attention, spec: Decoder) -> None:
    scale = attention.scale
    for name, norm in (("query_norm", attention.query_norm), ("key_norm", attention.key_norm)):
        if norm is not None:
            _fill_norm(entry[name], norm)
    entry["has_attention"] = True
    entry["head_norms"] = _head_norms(attention.query_norm, spec)
    entry["window"] = attention.window
    entry["table"] = -1 if attention.angles is None else attention.angles
    entry["scale"], entry["softcap"] = scale.factor, scale.softcap or 0.0
    entry["sinks"] = address(scale.sinks)
    entry["by_distance"] = address(scale.by_distance)
    entry["distances"] = 0 if scale.by_distance is None else scale.by_distance.shape[1]
    _fill_product(entry, "out", by_outputs(attention.out), attention.out.bias)


def _fill_mlp(entry: Any, mlp: Mlp) -> None:
    inner = by_outputs(mlp.second).shape[1]
    entry["inner"], entry["activation"], entry["is_gated"] = inner, int(mlp.activation), mlp.is_gated
    _fill_product(entry, "down", by_outputs(mlp.second), mlp.second.bias)
    # Gate and up as two products, or one behind the other in one.
    parts = [
        (by_outputs(product), product.bias, first)
        for product in mlp.first
        for first in range(0, len(by_outputs(product)), inner)
    ]
    for name, part in zip(("gate", "up"), parts, strict=False):
        _fill_product(entry, name, *part)


def _fill_product(entry: Any, name: str, weight: Tensor, bias: Tensor | None, first: int = 0) -> None:
    """A weight from row `first` on, the product for its format, and the bias."""
    entry[name], entry[f"{name}_product"] = row_address(weight, first), product_of(weight)
    entry[f"{name}_bias"] = row_address(bias, first)


def _fill_norm(entry: Any, norm: AnyNorm) -> None:
    is_centred = isinstance(norm, LayerNorm)
    entry["kind"] = norms.CENTRED if is_centred else norms.ROOT_MEAN_SQUARE
    entry["gain"], entry["bias"] = address(norm.weight), address(norm.bias) if isinstance(norm, LayerNorm) else 0
    entry["epsilon"], entry["offset"] = norm.epsilon, norm.offset


def _head_norms(norm: AnyNorm | None, spec: Decoder) -> int:
    if norm is None or norm.weight.shape == (spec.head_size,):
        return stack.SHARED_GAINS
    return stack.OWN_GAINS if norm.weight.ndim == 2 else stack.ALL_AS_ONE
