"""Decoders on a GPU: a few launches a layer, nothing waits for the host, so a CUDA graph can hold a pass.

transformers' modules stay the definition of the model: `bodies.readers` describes what they do, and this runs the
description. Weights that are multiplied with the same input are laid side by side when it is made (the modules then
hold views of them). What is not described is refused (`why_not` says what); the rest is compared with the modules in
the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from forerun import kernels, ops
from forerun.cache.base import CacheLayer, KeyValueCache, ranges
from forerun.kernels.scaled import ScaledWeight
from forerun.math import latent
from forerun.math.experts import ExpertWeights, without_identities
from forerun.math.ragged_attention import Reach, attend_prompts, reach_of, why_not_prompts
from forerun.math.scaled import RoundedRows
from forerun.math.skinny import Heads, Norm
from forerun.math.transfer import to_device
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
from forerun.models.bodies.merging import Product, expert_weights, merged, why_not_merged
from forerun.models.bodies.rehearsal import is_rehearsal, layers_of_each_kind
from forerun.types import RaggedRows

Angles = tuple[Tensor, Tensor]  # cosines and sines [N, T] of the new tokens
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_SIZE = 256  # of a head
LARGEST_LATENT = 512
MOST_RECORDED = 2048  # rows of a pass that a CUDA graph may hold: the longest piece of a prompt
GRAIN = 1024  # the table of angles grows by this many positions
# Families that were timed on a GPU (benchmarks/results/families-h200.json: a bare pass of one row reads at least .75 of
# what a copy does, .55 with experts): they are run by this without being asked for. All others that can be described
# were compared with their modules on CPUs, through the references and Triton's interpreter: kernels="on".
TIMED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "opt", "starcoder2", "gpt_neox", "olmo2", "granite",
    "phi3", "codegen", "cohere2", "glm4", "stablelm", "falcon", "gptj", "smollm3", "qwen3_moe", "gpt_oss", "mixtral",
    "deepseek_v3",
)  # fmt: skip


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps `model` (or a headless body) from being run by this; None where nothing does."""
    if reason := kernels.why_not_triton(model.device):
        return reason
    if model.dtype not in DTYPES:
        return f"{model.dtype} is none of float32, float16, bfloat16".replace("torch.", "")
    if reason := readers.why_not(model):
        return reason
    decoder = readers.describe(model)
    if reason := next(filter(None, map(why_not_merged, _merged_products(decoder))), None):
        return reason
    ups = (layer.attention.up for layer in decoder.layers if isinstance(layer.attention, LatentAttention))
    if any(isinstance(up.weight, ScaledWeight) for up in ups):
        return "latents that go through a rounded weight"
    size, most = decoder.head_size, LARGEST_SIZE if decoder.value_size is None else LARGEST_LATENT
    return f"heads of size {size}, odd or more than {most}" if size > most or size % 2 else None


def _merged_products(decoder: Decoder) -> Iterator[tuple[Product, ...]]:
    """Products whose weights will lie side by side."""
    for layer in decoder.layers:
        mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
        yield _first_weights(layer.attention)[0]
        if mlp is not None:
            yield mlp.first


@dataclass(frozen=True, slots=True)
class Weights:
    """A weight and a bias as they are multiplied: those of several modules side by side."""

    weight: Tensor  # [N, K], or a `ScaledWeight`
    bias: Tensor | None  # [N]
    group: ProcessGroup | None = None  # of processes with other inputs of the same product, whose parts are added up


@dataclass(frozen=True, slots=True)
class InnerWeights:
    """A described MLP with its weights."""

    spec: Mlp
    first: Weights
    second: Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """A described layer with its weights."""

    spec: DecoderLayer
    qkv: Weights  # of latent attention: what goes down
    out: Weights
    query_up: Weights | None
    up: Tensor | None
    order: Tensor | None  # of the heads in `qkv`
    mlp: InnerWeights | None  # or the one that all tokens go through beside experts
    experts: ExpertWeights | None


@dataclass(frozen=True, slots=True)
class PendingResidual:
    """What a layer adds to its hidden states and has not added yet: the sum is one launch with the next norm."""

    states: Tensor  # [N, H]
    norm: Norm | None  # of these states, before they are added
    multiplier: float


class GpuBody(DescribedBody):
    """What lies below a model's head, over the ragged cache, and the head."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        """`group`: of processes that hold other heads and other parts of the MLP."""
        self._group = group
        super().__init__(model)

    def hidden_at(
        self,
        new: Tensor,
        positions: Tensor,
        addresses: Tensor,
        reach: Reach,
        cache: KeyValueCache,
        rows: RaggedRows | None = None,
    ) -> Tensor:
        """Last hidden states [N, H], the final norm included, of token ids [N] or embeddings [N, H].

        `positions` [N] and `addresses` [N] (where keys go in a layer's `flat`) lie on the device, as do the
        tensors of `reach`, whose window is each layer's own affair. Keys and values of all layers are written.
        Where the host knows the `rows`, prompts are read by torch's attention.
        The table of angles covers the cache's capacity: a captured pass is good for as long as the cache does not move.
        """
        self._refresh(cache.capacity)
        x = self._embedded(new, positions)
        angles = [table[positions].chunk(2, dim=-1) for table in self._tables]
        pending: PendingResidual | None = None
        late: Tensor | None = None  # of the last layer's experts, where they are added behind this one
        for index, layer in enumerate(self.layers):
            attention = layer.spec.attention
            pool = cache.layer(index, *self._like)
            if is_rehearsal() and index not in self._rehearsed:
                continue
            turn = self._still if attention.angles is None else angles[attention.angles]
            seen = reach if reach.window == attention.window else replace(reach, window=attention.window)
            weight = None if layer.spec.is_parallel else layer.qkv.weight  # else the MLP takes the same
            x, inner, norm = _joined_for(weight, x, pending, layer.spec.before_attention)
            attend = self._attend_latents if isinstance(attention, LatentAttention) else self._attend
            mixed = attend(attention, inner, norm, layer, pool, turn, addresses, seen, rows)  # type: ignore[arg-type]
            if layer.spec.is_parallel:
                assert isinstance(inner, Tensor)
                x, pending = _parallel(x, inner, norm, mixed, layer)
            else:
                x, pending, experts_change = _sequential(x, mixed, layer)
                x, late = x if late is None else x + late, experts_change
        return _joined(x, pending, self.decoder.norm, alone=True)[1]

    def hidden(self, call: ForwardPass) -> Tensor:
        rows, cache, device = call.rows, call.cache, call.new.device
        positions, addresses = (
            to_device(numbers, device) for numbers in (ranges(rows.past, rows.counts), cache.addresses(rows))
        )
        return self.hidden_at(call.new, positions, addresses, reach_of(rows, device, table=cache.table), cache, rows)

    def head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return self._scaled(ops.project(hidden, head.weight, head.bias))

    def head_into(self, out: Tensor, hidden: Tensor) -> None:
        """The same, left in `out` [M, V]."""
        head = self.model.get_output_embeddings()
        ops.project_into(out, hidden, head.weight, head.bias)
        self._scaled(out)

    def _attend(
        self,
        spec: Attention,
        inner: Tensor | RoundedRows,
        norm: Norm | None,
        layer: Layer,
        pool: CacheLayer,
        turn: Angles,
        addresses: Tensor,
        reach: Reach,
        rows: RaggedRows | None,
    ) -> Tensor:
        """What attention's last product takes, [N, Hq * D]; keys and values are written."""
        heads = Heads(
            self.decoder.num_heads, self.decoder.num_key_heads, *turn, addresses, *pool.flat,
            self.decoder.is_interleaved, layer.order,
        )  # fmt: skip
        query = self._query(spec, inner, norm, layer, heads)
        if rows is None or why_not_prompts(rows, spec.window, spec.scale):
            return ops.attend_ragged(query, *pool.by_head, reach, spec.scale).flatten(1)
        return attend_prompts(query, *pool.by_head, rows, reach.table, spec.scale).flatten(1)

    def _attend_latents(
        self,
        spec: LatentAttention,
        inner: Tensor | RoundedRows,
        norm: Norm | None,
        layer: Layer,
        pool: CacheLayer,
        turn: Angles,
        addresses: Tensor,
        reach: Reach,
        rows: RaggedRows | None,
    ) -> Tensor:
        """The same, [N, H * V]; latents and shared keys are written."""
        assert layer.up is not None
        projected = ops.project(inner, layer.qkv.weight, layer.qkv.bias, norm)
        query = ops.write_latents(
            projected, spec.query_norm, spec.latent_norm, *turn, addresses, *pool.flat, spec.heads
        )  # fmt: skip
        if layer.query_up is not None:
            query = ops.project(query, layer.query_up.weight, layer.query_up.bias)
        latents, shared_keys = pool.by_head
        if rows is not None and latent.why_not_prompts(rows) is None:
            return latent.attend_prompts(
                query, layer.up, *turn, latents, shared_keys, rows, reach.table, spec.scale, spec.heads
            )
        query, turning = ops.absorb(query, layer.up, *turn, spec.heads)
        mixed = ops.attend_ragged(query, latents, latents, reach, spec.scale, tail=(turning, shared_keys))
        return ops.expand(mixed, layer.up, spec.heads)

    def _query(
        self, spec: Attention, inner: Tensor | RoundedRows, norm: Norm | None, layer: Layer, heads: Heads
    ) -> Tensor:
        """Rotated queries [N, Hq, D]; keys and values are written."""
        norms = spec.query_norm, spec.key_norm
        if _is_of_a_head(norms[0], heads.size) and _is_of_a_head(norms[1], heads.size):
            heads = replace(heads, query_norm=norms[0], key_norm=norms[1])
            return ops.project_heads(inner, layer.qkv.weight, layer.qkv.bias, norm, heads)
        query, keys, values = heads.split(ops.project(inner, layer.qkv.weight, layer.qkv.bias, norm))
        query, keys = (_head_normed(*pair) for pair in zip((query, keys), norms, strict=True))
        return ops.rotate_and_write(query, keys, values, *heads.tensors, heads.interleaved)

    def _refresh(self, capacity: int) -> None:
        """Weights may have moved since the last pass, the cache may have grown."""
        self._check_weights()
        for index, table in enumerate(self._tables):
            if capacity > len(table):
                self._tables[index] = self.decoder.tables[index](-(-capacity // GRAIN) * GRAIN)

    def _why_not(self) -> str | None:
        return why_not(self.model)

    def _take_weights(self) -> None:
        self.layers = [_with_weights(layer, self.model.device, self._group) for layer in self.decoder.layers]
        self._rehearsed = layers_of_each_kind(self.layers)
        self._tables = [table(GRAIN) for table in self.decoder.tables]
        like = self.decoder.norm.weight
        sizes = self.decoder.head_size, self.decoder.value_size or self.decoder.head_size
        self._like = tuple(like.new_empty(0, self.decoder.num_key_heads, size) for size in sizes)
        self._still = (like.new_empty(1, 0),) * 2  # angles of layers that do not rotate


def _joined(
    x: Tensor, pending: PendingResidual | None, norm: AnyNorm | None, alone: bool = False
) -> tuple[Tensor, Tensor, Norm | None]:
    """x with all changes added, what the next product takes, and the norm that is left to that product.

    One row is normed by every program of a product for itself; for more, and where no product follows (`alone`), there
    is a launch of its own.
    """
    if pending is not None:
        x, inner = ops.added(x, pending.states, norm, pending.norm, pending.multiplier)
        return x, inner, None
    if norm is None or (isinstance(norm, Norm) and not alone):
        return x, x, norm
    return x, ops.normed(x, norm), None


def _joined_for(
    weight: Tensor | None, x: Tensor, pending: PendingResidual | None, norm: AnyNorm | None
) -> tuple[Tensor, Tensor | RoundedRows, Norm | None]:
    """The same for a product with this weight alone: rounded on the way, where it takes rounded rows."""
    if norm is None or not isinstance(weight, ScaledWeight) or not weight.scheme.rounds_rows:
        return _joined(x, pending, norm)
    if pending is None:
        return x, ops.normed_and_rounded(x, norm, weight.scheme), None
    x, inner = ops.added_and_rounded(x, pending.states, norm, pending.norm, pending.multiplier, weight.scheme)
    return x, inner, None


def _sequential(x: Tensor, mixed: Tensor, layer: Layer) -> tuple[Tensor, PendingResidual | None, Tensor | None]:
    """The MLP reads what attention left, and so do late experts, whose part comes third."""
    spec = layer.spec
    x, pending = _add(x, mixed, layer.out, spec.after_attention, spec.multiplier)
    if isinstance(spec.mlp, Experts):
        x, states, _ = _joined(x, pending, spec.before_mlp, alone=True)
        return x, PendingResidual(_from_experts(states, spec.mlp, layer), spec.after_mlp, spec.multiplier), None
    assert layer.mlp is not None
    inner: Tensor | RoundedRows
    if spec.late_experts is None:
        x, inner, norm = _joined_for(layer.mlp.first.weight, x, pending, spec.before_mlp)
        late = None
    else:
        x, states, norm = _joined(x, pending, spec.before_mlp, alone=True)
        inner, late = states, _from_experts(states, spec.late_experts, layer)
    x, pending = _add(x, _activated(inner, norm, layer.mlp), layer.mlp.second, spec.after_mlp, spec.multiplier)
    return x, pending, late


def _from_experts(inner: Tensor, spec: Experts, layer: Layer) -> Tensor:
    """What the experts of each row make of it."""
    assert layer.experts is not None
    if spec.has_identities:
        return _with_identities(inner, spec, layer.experts)
    outputs = ops.run_experts(inner, spec.router, spec.route, layer.experts, _library(spec.module, len(inner)))
    if spec.shared is None:
        return outputs
    assert layer.mlp is not None
    other = ops.project(_activated(inner, None, layer.mlp), layer.mlp.second.weight, layer.mlp.second.bias)
    if spec.shared_gate is not None:
        other = torch.sigmoid(spec.shared_gate(inner)) * other
    return outputs + other


def _library(module: Any, rows: int) -> Any:
    """transformers' experts for passes of many rows; None where they ask the host who was chosen, which no CUDA graph
    can record: in prompts longer than any recorded pass that costs less than to read all experts time and again."""
    config = getattr(module, "config", None)  # modules that know a loop alone keep none (LongCat-Flash)
    asks = getattr(config, "_experts_implementation", None) in (None, "eager")
    return None if asks and rows <= MOST_RECORDED else module


def _with_identities(inner: Tensor, spec: Experts, weights: ExpertWeights) -> Tensor:
    """The same where some of a row's experts give back what they are given."""
    shares, chosen = spec.route(inner)
    shares, chosen, identities = without_identities(shares, chosen, len(weights.second))
    outputs = ops.run_experts(inner, None, lambda _: (shares, chosen), weights, _library(spec.module, len(inner)))
    return identities.added(outputs, inner)


def _parallel(
    x: Tensor, inner: Tensor, norm: Norm | None, mixed: Tensor, layer: Layer
) -> tuple[Tensor, PendingResidual | None]:
    """The MLP reads what attention read, unless it has a norm of its own. Both are added as one change."""
    assert layer.mlp is not None, "no family has experts beside attention"
    if layer.spec.before_mlp is not None:
        _, inner, norm = _joined(x, None, layer.spec.before_mlp)
    is_alone, multiplier = len(x) == 1, layer.spec.multiplier
    out, second = layer.out, layer.mlp.second
    total = ops.project(mixed, out.weight, out.bias, residual=x if is_alone else None, multiplier=multiplier)
    inner = _activated(inner, norm, layer.mlp)
    total = ops.project(inner, second.weight, second.bias, residual=total, multiplier=multiplier)
    return (total, None) if is_alone else (x, PendingResidual(total, None, 1.0))


def _add(
    x: Tensor, states: Tensor, product: Weights, norm: Norm | None, multiplier: float
) -> tuple[Tensor, PendingResidual | None]:
    """x and a product of `states`: added at once to a single row, otherwise left for the next norm's launch."""
    if len(x) == 1 and norm is None and product.group is None:
        outputs = ops.project(states, product.weight, product.bias, residual=x, multiplier=multiplier)
        return outputs, None
    outputs = ops.project(states, product.weight, product.bias)
    if product.group is not None:
        dist.all_reduce(outputs, group=product.group)
    return x, PendingResidual(outputs, norm, multiplier)


def _activated(inner: Tensor | RoundedRows, norm: Norm | None, mlp: InnerWeights) -> Tensor:
    """What the MLP's second product takes."""
    first, spec = mlp.first, mlp.spec
    if spec.is_gated:
        return ops.gate(inner, first.weight, norm, first.bias, spec.activation)
    return ops.project(inner, first.weight, first.bias, norm, activation=spec.activation)


def _is_of_a_head(norm: AnyNorm | None, size: int) -> TypeGuard[Norm | None]:
    """Whether rotation and write can norm on their way."""
    return norm is None or (isinstance(norm, Norm) and norm.weight.shape == (size,))


def _head_normed(states: Tensor, norm: AnyNorm | None) -> Tensor:
    """[N, heads, D], each head for itself, or all as one where the norm is as wide as all."""
    if norm is None:
        return states
    if norm.weight.ndim == 1 and norm.weight.shape[0] != states.shape[-1]:
        return ops.normed(states.flatten(1), norm).view(states.shape)
    return ops.normed(states, norm)


def _with_weights(spec: DecoderLayer, device: torch.device, group: ProcessGroup | None) -> Layer:
    attention, experts = spec.attention, spec.experts
    first, order, query_up, up = _first_weights(attention)
    return Layer(
        spec,
        qkv=Weights(*merged(first)),
        out=Weights(*merged([attention.out]), group),
        query_up=None if query_up is None else Weights(*merged([query_up])),
        up=None if up is None else merged([up])[0],
        order=None if order is None else torch.tensor(order, dtype=torch.int32, device=device),
        mlp=_inner(spec.mlp.shared if isinstance(spec.mlp, Experts) else spec.mlp, group),
        experts=None if experts is None else expert_weights(experts.module, experts.activation),
    )


def _first_weights(
    spec: Attention | LatentAttention,
) -> tuple[tuple[Product, ...], tuple[int, ...] | None, Product | None, Product | None]:
    """Products that take hidden states, the order of their heads; what makes queries and keys of a latent."""
    if isinstance(spec, LatentAttention):
        return spec.down, None, spec.query_up, spec.up
    return spec.qkv, spec.head_order, None, None


def _inner(mlp: Mlp | None, group: ProcessGroup | None) -> InnerWeights | None:
    if mlp is None:
        return None
    return InnerWeights(mlp, first=Weights(*merged(mlp.first)), second=Weights(*merged([mlp.second]), group))
