"""Described decoders on the CPU with a library's products: for passes of many tokens.

Tiles of ours (`bodies.cpu`) read a weight once for few tokens and add up in one order; for hundreds of tokens a
library's products are faster. What lies between the products is compiled, as there: modules have a dozen small
operations for it, each of which goes through all activations. Nobody needs the last layer of a prompt but for its last
token, so what is not asked for is left out; drafters that read hidden states may ask for it later.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from forerun.cache.base import KeyValueCache, ranges
from forerun.kernels.cpu import norms, pointwise
from forerun.kernels.cpu.memory import Ints
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.cpu.threads import turn
from forerun.math.banded_attention import Bands, attend_bands, bands
from forerun.models.bodies import cpu, readers
from forerun.models.bodies.base import ForwardPass, PassOutput
from forerun.models.bodies.description import Attention, Decoder, DecoderLayer, Mlp
from forerun.models.bodies.merging import Product, by_outputs
from forerun.types import RaggedRows

INNER_TOKENS = 1024  # of which an MLP's activations are in memory at once


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model that `cpu.why_not` lets through from being run by this; None where nothing does."""
    return _why_not(readers.describe(model))


def _why_not(decoder: Decoder) -> str | None:
    for layer in decoder.layers:
        if not isinstance(layer.attention, Attention):
            return "attention over latents"
        if not isinstance(layer.mlp, Mlp) or layer.late_experts is not None:
            return "experts"
        if layer.attention.scale.by_distance is not None:
            return "scores with a bias by distance"
        if layer.attention.head_order is not None and layer.attention.query_norm is not None:
            return "norms of heads that stand in an order of their own"
    return None


class LibraryBody(cpu.CpuBody):
    """The same layers, product by product."""

    def run(self, call: ForwardPass) -> PassOutput:
        tails = _tails(call)
        out = self._with_logits(call, self._last_states(call, tails))
        return replace(out, finished=tuple(tails)) if call.wants_hidden and tails is not None else out

    def hidden(self, call: ForwardPass) -> Tensor:
        return self._last_states(call, _tails(call))

    def _last_states(self, call: ForwardPass, tails: list[int] | None) -> Tensor:
        """Hidden states [N, H]: only the last `tails[i]` positions of each row have gone through the last layer."""
        self._check_weights()
        positions, starts = cpu.places_of(call.rows, call.cache)
        x = self._embedded(call.new, torch.from_numpy(positions))
        x = x.clone() if x is call.new else x.contiguous()
        self._prepare(call.cache, call.rows.longest, 0)
        wanted = None if tails is None else _wanted(call, tails)
        states, room = _States(x, call.rows), _Room()
        with turn(self.num_threads):
            for index, layer in enumerate(self.decoder.layers):
                addresses = starts + positions
                inner, query = self._write_heads(
                    index, layer.attention, states.x, positions, addresses, room, self._layers
                )
                if wanted is not None and index == len(self.decoder.layers) - 1:
                    states, inner, query = states.of(*wanted), inner[wanted[1]], query[:, wanted[1]]
                if len(states.x):
                    self._finish_layer(index, layer, states, inner, query, room)
        self._pools = []  # the cache's: it may give them back before the next long pass
        last = states.x.numpy()
        norms.norms(last, self._norm, last)
        if wanted is None:
            return states.x
        x[wanted[1]] = states.x
        return x

    def finish(self, states: Tensor, rows: RaggedRows, cache: KeyValueCache) -> Tensor:
        """Keys and values stay as they are: made again among other tokens, they may be rounded otherwise."""
        self._check_weights()
        x, index, decoder = states.clone(), len(self.decoder.layers) - 1, self.decoder
        positions, _ = cpu.places_of(rows, cache)
        self._prepare(cache, rows.longest, 0)
        layer, layers, room = decoder.layers[index], self._layers.copy(), _Room()
        aside = x.new_empty(2, len(x), decoder.num_key_heads, decoder.head_size)
        layers[index]["keys"], layers[index]["values"] = aside[0].data_ptr(), aside[1].data_ptr()
        with turn(self.num_threads):
            inner, query = self._write_heads(index, layer.attention, x, positions, np.arange(len(x)), room, layers)
            self._finish_layer(index, layer, _States(x, rows), inner, query, room)
        self._pools = []
        norms.norms(x.numpy(), self._norm, x.numpy())
        return x

    def _write_heads(
        self, index: int, spec: Any, x: Tensor, positions: Ints, addresses: Ints, room: _Room, layers: Any
    ) -> tuple[Tensor, Tensor]:
        """What attention reads [N, H], and queries [Hq, N, D]; keys and values are where `layers` say."""
        decoder, inner = self.decoder, torch.empty_like(x)
        pointwise.norm_rows(x.numpy(), self._layers, index, False, inner.numpy(), self.num_threads)
        query = x.new_empty(decoder.num_heads, len(x), decoder.head_size)
        pointwise.finish_rows(
            _products(inner, spec.qkv, room).numpy(), query.numpy(), *self._head_places(spec, len(x)), layers, index,
            self._angles, positions, addresses, decoder.is_interleaved, decoder.num_key_heads, self.num_threads,
        )  # fmt: skip
        return inner, query

    def _head_places(self, spec: Attention, tokens: int) -> tuple[Ints, Ints]:
        """Where `_products` puts the first token's query, key and value heads; how far from there the next one's."""
        count = self.decoder.num_heads + 2 * self.decoder.num_key_heads
        order = np.array(range(count) if spec.head_order is None else spec.head_order, dtype=np.int64)
        widths = np.array([by_outputs(product).shape[0] for product in spec.qkv], dtype=np.int64)
        ends, columns = np.cumsum(widths), order * self.decoder.head_size
        which = np.searchsorted(ends, columns, side="right")
        before = (ends - widths)[which]  # outputs of the products before a head's
        return before * tokens + columns - before, widths[which]

    def _finish_layer(
        self, index: int, layer: DecoderLayer, states: _States, inner: Tensor, query: Tensor, room: _Room
    ) -> None:
        """Attention over the cache and the MLP, added to the hidden states in place."""
        spec, x, threads = layer.attention, states.x, self.num_threads
        assert isinstance(spec, Attention) and isinstance(layer.mlp, Mlp)
        pools = self._pools[index].by_head
        mixed = attend_bands(query.transpose(0, 1), *pools, states.bands(spec.window), spec.scale)
        delta = torch.empty_like(x)
        _multiply(mixed.reshape(len(x), -1), spec.out, delta, room)
        if layer.is_parallel:  # the MLP reads x before attention is added to it
            pointwise.norm_rows(x.numpy(), self._layers, index, True, inner.numpy(), threads)
        pointwise.add_rows(x.numpy(), delta.numpy(), self._layers, index, False, threads)
        if not layer.is_parallel:
            pointwise.norm_rows(x.numpy(), self._layers, index, True, inner.numpy(), threads)
        width = int(self._layers[index]["inner"])
        for part, some in zip(delta.split(INNER_TOKENS), inner.split(INNER_TOKENS), strict=True):
            gate_up = some.new_empty(len(layer.mlp.first), len(some), by_outputs(layer.mlp.first[0]).shape[0])
            for product, out in zip(layer.mlp.first, gate_up, strict=True):
                _multiply(some, product, out, room)
            stride, to_up = gate_up.shape[2], width if len(gate_up) == 1 else gate_up[0].numel()
            pointwise.activate_rows(gate_up.view(-1).numpy(), len(some), stride, to_up, self._layers, index, threads)
            _multiply(gate_up[0, :, :width], layer.mlp.second, part, room)
        pointwise.add_rows(x.numpy(), delta.numpy(), self._layers, index, True, threads)


class _States:
    """Hidden states of some tokens of rows, and what they see."""

    def __init__(self, x: Tensor, rows: RaggedRows) -> None:
        self.x, self.rows = x, rows  # [N, H]
        self._bands: dict[int, Bands] = {}

    def of(self, rows: RaggedRows, tokens: Tensor) -> _States:
        return _States(self.x[tokens], rows)

    def bands(self, window: int) -> Bands:
        if window not in self._bands:
            self._bands[window] = bands(self.rows, window, self.x)
        return self._bands[window]


def _tails(call: ForwardPass) -> list[int] | None:
    """How many of the last tokens of each row the last layer is for; None where it is for all."""
    if (call.wants_hidden and not call.may_skip_last) or (call.wants_logits and call.keep is None):
        return None
    if not call.wants_logits or call.keep is None:
        return [0] * len(call.rows.counts)
    ends = torch.tensor([0, *accumulate(call.rows.counts)])
    tails: list[int] = torch.histogram(call.keep.double(), ends.double()).hist.long().tolist()
    starts = [end - tail for end, tail in zip(ends[1:].tolist(), tails, strict=True)]
    return tails if torch.equal(ranges(starts, tails), call.keep) else None


def _wanted(call: ForwardPass, tails: list[int]) -> tuple[RaggedRows, Tensor]:
    """Those tokens, and where they stand."""
    rows = call.rows
    columns = zip(rows.slots, rows.past, rows.counts, tails, strict=True)
    ending = [(slot, past + count - tail, tail) for slot, past, count, tail in columns if tail]
    slots, before, counts = zip(*ending, strict=True) if ending else ((), (), ())
    keep = torch.zeros(0, dtype=torch.long) if call.keep is None else call.keep
    return RaggedRows(slots, before, counts), keep


class _Room:
    """Where weights that are stored narrow are widened, one after the other, as long as a pass takes.

    New memory for each would cost as much time as widening: the system hands it out page by page, cleared.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def widened(self, weight: NarrowWeight) -> Tensor:
        if weight.numel() > len(self._memory):
            self._memory = torch.empty(weight.numel(), dtype=torch.float32)
        return weight.dense(self._memory)


def _products(x: Tensor, products: tuple[Product, ...], room: _Room) -> Tensor:
    """One behind the other, each [N, outputs]: rows that do not follow one another are slower by half with what torch
    takes on ARM."""
    shapes = [(len(x), by_outputs(product).shape[0]) for product in products]
    outputs = x.new_empty(sum(map(prod, shapes)))
    for product, shape, out in zip(products, shapes, outputs.split([*map(prod, shapes)]), strict=True):
        _multiply(x, product, out.view(shape), room)
    return outputs


def _multiply(x: Tensor, product: Product, out: Tensor, room: _Room) -> None:
    weight, bias = by_outputs(product), product.bias
    if isinstance(weight, NarrowWeight):
        if weight.multiplies_integers:
            out.copy_(F.linear(x, weight, bias))
            return
        weight = room.widened(weight)
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)
