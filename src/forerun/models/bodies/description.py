"""Decoder layers as data: what a fused body must know of a model to run it without its modules.

`bodies.readers` reads a description off transformers' own modules. Weights are named by the modules that hold them, so
that a body may lay them out as it likes; norms refer to their weights where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forerun.math.attention import Scale
from forerun.math.latent import LatentHeads
from forerun.math.routing import Router
from forerun.math.skinny import Activation, LayerNorm, Norm
from forerun.models.bodies.merging import Product

AnyNorm = Norm | LayerNorm
# Cosines and sines [count, 2 T] of positions 0 .. count - 1, side by side, on the model's device, in
# the dtype that the model rotates in.
AngleTable = Callable[[int], Tensor]
# [N, H] -> what each chosen expert counts [N, k], which they are [N, k]: by the model's own router.
Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values, what they are made of, and what becomes of their product."""

    qkv: tuple[Product, ...]  # products whose results stand side by side: all queries, all keys, all values
    out: Product
    scale: Scale
    # Which head of that product is query, key, value 0, 1 ...; None where they stand in this order.
    head_order: tuple[int, ...] | None = None
    query_norm: AnyNorm | None = None  # of each head, or of all heads as one
    key_norm: AnyNorm | None = None
    window: int = 0  # keys a token sees, 0 for all
    angles: int | None = None  # which of the decoder's tables rotates queries and keys; None: they are not rotated


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are products of one latent a token: see `math.latent`."""

    # Products whose results stand side by side: what queries are made of (or queries), the latent, the shared key.
    down: tuple[Product, ...]
    latent_norm: Norm
    up: Product  # of the latent: keys and values of one head after the other
    out: Product
    scale: Scale
    heads: LatentHeads
    query_norm: Norm | None = None  # of what queries are made of; None: the first product makes queries
    query_up: Product | None = None
    window: int = 0
    angles: int = 0  # which of the decoder's tables rotates


@dataclass(frozen=True, slots=True)
class Mlp:
    """One product, an activation, a second product; or two of which one gates the other in the place of the first."""

    first: tuple[Product, ...]  # of a gated one: gate and up, or both in one
    second: Product
    activation: Activation
    is_gated: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """Many MLPs of which a router chooses a few for each token, and perhaps one that all tokens go through."""

    route: Route
    router: Router | None  # what `route` does, where there are words for it
    module: Any  # transformers' own module of all experts, which runs passes of many rows
    activation: Activation | None  # see `math.experts.ExpertWeights`
    shared: Mlp | None = None
    shared_gate: Product | None = None  # its sigmoid is what the shared one counts
    has_identities: bool = False  # numbers past the last expert stand for experts that give back what they are given


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and an MLP, each with a norm before it, behind it, both or neither."""

    attention: Attention | LatentAttention
    mlp: Mlp | Experts
    before_attention: AnyNorm | None = None
    after_attention: Norm | None = None
    before_mlp: AnyNorm | None = None  # of a parallel layer without one, the MLP takes what attention takes
    after_mlp: Norm | None = None
    is_parallel: bool = False  # both read the same hidden states; otherwise the MLP reads what attention left
    multiplier: float = 1.0  # of what each adds to the hidden states
    late_experts: Experts | None = None  # read what the MLP reads, and are added behind the next layer; latents alone

    @property
    def experts(self) -> Experts | None:
        """In the place of the MLP, or late ones."""
        return self.mlp if isinstance(self.mlp, Experts) else self.late_experts


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole decoder: embeddings, layers, the last norm, and what its logits go through."""

    num_heads: int
    num_key_heads: int  # 1 of latent attention, which shares one key and one latent
    head_size: int  # of a key as the cache holds it: of latent attention the latent's
    layers: tuple[DecoderLayer, ...]
    norm: AnyNorm
    value_size: int | None = None  # where the cache holds something of another size beside it
    tables: tuple[AngleTable, ...] = ()
    is_interleaved: bool = False  # which dimensions turn together: see `math.cache_write.rotated`
    embedding_multiplier: float = 1.0  # of given embeddings, too
    embedding_norm: AnyNorm | None = None
    positions: Tensor | None = None  # [P, H] learned, added to embeddings
    position_offset: int = 0  # of position 0 in that table
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
