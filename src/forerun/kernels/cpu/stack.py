"""All decoder layers of a described model in one call: no Python, no allocation, five parallel regions a layer.

What a layer does is data (`LAYER`, filled from `models.bodies.description`): norms, heads, rotation, attention, MLP.
Threads split heads or the rows of a weight between them; small pointwise work is done by whoever needs its result, or
by one thread between two regions. New keys and values go straight into the ragged cache. Every number of a token
depends on that token's row alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from forerun.kernels.cpu.activation import SILU, activate, gated
from forerun.kernels.cpu.attention import attend
from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.memory import Floats, Ints, add_at, write_at
from forerun.kernels.cpu.norms import NONE, NORM, norm, norms
from forerun.kernels.cpu.product import multiply
from forerun.kernels.cpu.share import GRAIN, share

WHOLE, ATTENTION, MLP = range(3)  # layers, or a half of each
SHARED_GAINS, OWN_GAINS, ALL_AS_ONE = range(3)  # norms of queries and keys: one gain for all heads, one for each, ...
# Names that are no norms, numbers or flags are addresses, 0 where the model has none. A weight is stored in any format:
# the address of the product for it stands beside it (see `product`). All other tensors are float32.
LAYER = np.dtype([
    ("before_attention", NORM), ("query_norm", NORM), ("key_norm", NORM), ("after_attention", NORM),
    ("before_mlp", NORM), ("after_mlp", NORM),
    ("out", "i8"), ("out_product", "i8"), ("out_bias", "i8"),
    ("gate", "i8"), ("gate_product", "i8"), ("gate_bias", "i8"),  # without a gate: `gate` is the first product
    ("up", "i8"), ("up_product", "i8"), ("up_bias", "i8"),
    ("down", "i8"), ("down_product", "i8"), ("down_bias", "i8"),
    ("keys", "i8"), ("values", "i8"),  # of the layer's cache: [slots, capacity, key heads, size]
    ("sinks", "i8"), ("by_distance", "i8"), ("distances", "i8"),  # see `attention.attend`
    ("head_norms", "i8"),  # SHARED_GAINS, OWN_GAINS, ALL_AS_ONE
    ("window", "i8"),  # keys that a token sees, 0 for all
    ("table", "i8"),  # which angles rotate queries and keys; -1: none
    ("has_attention", "i8"),  # 0: it is no part of this call
    ("inner", "i8"),  # width of the MLP; 0: the same
    ("activation", "i8"), ("is_gated", "i8"), ("is_parallel", "i8"),
    ("scale", "f4"), ("softcap", "f4"), ("multiplier", "f4"),
], align=True)  # fmt: skip


@compiled()
def rotate(head: Floats, angles: Floats, interleaved: bool) -> None:
    """The first dimensions of a head, in pairs, by cosines and sines [2 T] side by side."""
    turning = angles.shape[0] // 2
    half = turning // 2
    if interleaved:
        for i in range(half):
            low, high = head[2 * i], head[2 * i + 1]
            head[2 * i] = low * angles[i] - high * angles[turning + i]
            head[2 * i + 1] = high * angles[i] + low * angles[turning + i]
    else:
        for i in range(half):
            low, high = head[i], head[half + i]
            head[i] = low * angles[i] - high * angles[turning + i]
            head[half + i] = high * angles[half + i] + low * angles[turning + half + i]


@njit(nogil=True, cache=True)
def _project_head(
    unit: int,
    num_heads: int,
    num_kv_heads: int,
    layer: Any,
    weight: Ints,
    normed: Floats,
    heads: Floats,
    angles: Floats,
    positions: Ints,
    addresses: Ints,
    interleaved: bool,
) -> None:
    """One head of queries, keys or values for all tokens; keys and values end in the cache. `weight` is as in `qkv`."""
    tokens, hidden = normed.shape
    width = heads.shape[1]
    size = width // (num_heads + 2 * num_kv_heads)
    place = heads.ctypes.data + unit * size * 4
    rows, product, bias = weight[0], weight[1], weight[2]
    multiply(product, rows, normed.ctypes.data, hidden, place, width, tokens, hidden, 0, size)
    for n in range(tokens):
        part = heads[n, unit * size : (unit + 1) * size]
        if bias:
            add_at(part, bias)
        if layer.head_norms != ALL_AS_ONE:
            _finish_head(unit, num_heads, num_kv_heads, layer, part, angles, positions[n], addresses[n], interleaved)


@njit(nogil=True, cache=True)
def _finish_head(
    unit: int,
    num_heads: int,
    num_kv_heads: int,
    layer: Any,
    part: Floats,
    angles: Floats,
    position: int,
    address: int,
    interleaved: bool,
) -> None:
    """What happens to one head of one token behind the product: norm, rotation, the cache's write."""
    size = part.shape[0]
    if unit < num_heads + num_kv_heads:
        is_query = unit < num_heads
        head = unit if is_query else unit - num_heads
        skip = head * size if layer.head_norms == OWN_GAINS else 0
        if layer.head_norms != ALL_AS_ONE:
            norm(part, layer.query_norm if is_query else layer.key_norm, part, skip)
        if layer.table >= 0:
            rotate(part, angles[layer.table, position], interleaved)
    if unit >= num_heads:
        is_key = unit < num_heads + num_kv_heads
        head = unit - num_heads - (0 if is_key else num_kv_heads)
        place = (layer.keys if is_key else layer.values) + (address * num_kv_heads + head) * size * 4
        write_at(part, place)


@njit(nogil=True, cache=True)
def _attend_part(
    part: int,
    num_threads: int,
    together: int,
    group: int,
    num_heads: int,
    num_kv_heads: int,
    layer: Any,
    heads: Floats,
    mixed: Floats,
    positions: Ints,
    starts: Ints,
    scores: int,
) -> None:
    """Every `num_threads`-th (token, `together` query heads of one key head)."""
    tokens, width = heads.shape
    size = mixed.shape[1] // num_heads
    for unit in range(part, tokens * (num_heads // together), num_threads):
        n, head = unit % tokens, unit // tokens * together
        first = max(0, positions[n] + 1 - layer.window) if layer.window else 0
        offset = ((starts[n] + first) * num_kv_heads + head // group) * size * 4
        attend(
            heads.ctypes.data + (n * width + head * size) * 4, layer.keys + offset, layer.values + offset,
            mixed.ctypes.data + (n * num_heads + head) * size * 4, together, size, num_kv_heads * size,
            positions[n] + 1 - first, layer.scale, scores, layer.softcap, layer.sinks + head * 4 if layer.sinks else 0,
            layer.by_distance + head * layer.distances * 4 if layer.by_distance else 0, layer.distances,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _inner_part(layer: Any, normed: Floats, gate: Floats, up: Floats, first: int, last: int) -> None:
    """Columns `first` to `last` of what the MLP's second product takes."""
    tokens, hidden = normed.shape
    source, width = normed.ctypes.data, gate.shape[1]
    multiply(layer.gate_product, layer.gate, source, hidden, gate.ctypes.data, width, tokens, hidden, first, last)
    if layer.is_gated:
        multiply(layer.up_product, layer.up, source, hidden, up.ctypes.data, width, tokens, hidden, first, last)
    for n in range(tokens):
        mine, other = gate[n, first:last], up[n, first:last]
        if layer.gate_bias:
            add_at(mine, layer.gate_bias + first * 4)
        if layer.up_bias:
            add_at(other, layer.up_bias + first * 4)
        if layer.is_gated and layer.activation == SILU:
            gated(mine, other)
        else:
            activate(mine, layer.activation)
            if layer.is_gated:
                for i in range(mine.shape[0]):
                    mine[i] *= other[i]


@njit(nogil=True, cache=True)
def _add_product(
    x: Floats,
    weight: int,
    product: int,
    bias: int,
    source: Floats,
    delta: Floats,
    first: int,
    last: int,
    multiplier: np.float32,
    is_left: bool,
) -> None:
    """Columns `first` to `last` of x += multiplier * (source @ weight.T + bias); `is_left`: of `delta`, and x as is."""
    tokens, width = source.shape
    hidden = x.shape[1]
    multiply(product, weight, source.ctypes.data, width, delta.ctypes.data, hidden, tokens, width, first, last)
    for n in range(tokens):
        if bias:
            add_at(delta[n, first:last], bias + first * 4)
        if not is_left:
            for i in range(first, last):
                x[n, i] += multiplier * delta[n, i]


@njit(nogil=True, cache=True)
def _add_normed(x: Floats, delta: Floats, spec: Any, multiplier: np.float32) -> None:
    """x += multiplier * norm(delta)."""
    for n in range(x.shape[0]):
        norm(delta[n], spec, delta[n])
        for i in range(x.shape[1]):
            x[n, i] += multiplier * delta[n, i]


@njit(nogil=True, cache=True)
def _finish_heads(
    num_heads: int,
    num_kv_heads: int,
    layer: Any,
    heads: Floats,
    angles: Floats,
    positions: Ints,
    addresses: Ints,
    interleaved: bool,
) -> None:
    """Where queries are normed as one vector, and keys as another: everything behind the products."""
    units = num_heads + 2 * num_kv_heads
    size = heads.shape[1] // units
    for n in range(heads.shape[0]):
        query = heads[n, : num_heads * size]
        keys = heads[n, num_heads * size : (num_heads + num_kv_heads) * size]
        norm(query, layer.query_norm, query)
        norm(keys, layer.key_norm, keys)
        for unit in range(units):
            part = heads[n, unit * size : (unit + 1) * size]
            _finish_head(unit, num_heads, num_kv_heads, layer, part, angles, positions[n], addresses[n], interleaved)


@njit(nogil=True, parallel=True, cache=True)
def run_stack(
    x: Floats,  # [N, hidden] float32: embeddings in, last hidden states (before the final norm) out
    layers: Any,  # [layers] of LAYER
    qkv: Ints,  # [layers, heads + 2 kv heads, 3] int64 addresses of each head's weight rows, their product and bias
    positions: Ints,  # [N] int64
    starts: Ints,  # [N] int64, where the token's row begins: slot * capacity
    angles: Floats,  # [tables, positions, 2 T] float32: cosines and sines side by side
    interleaved: bool,  # see `math.cache_write.rotated`
    num_heads: int,
    num_kv_heads: int,
    size: int,
    num_threads: int,
    scratch: Floats,  # float32
    only: int,  # WHOLE; or a half of each layer, and what it would add to x is left in `delta_of` the scratch memory
) -> None:
    tokens, hidden = x.shape
    units = num_heads + 2 * num_kv_heads
    group = num_heads // num_kv_heads
    longest = positions.max() + 1
    inner = layers.inner.max()
    # Where each buffer of the scratch memory begins.
    at_normed = 0
    at_heads = at_normed + num_threads * tokens * hidden
    at_mixed = at_heads + tokens * units * size
    at_delta = at_mixed + tokens * num_heads * size
    at_gate = at_delta + tokens * hidden
    at_up = at_gate + tokens * inner
    at_scores = at_up + tokens * inner
    heads = scratch[at_heads:at_mixed].reshape(tokens, units * size)
    mixed = scratch[at_mixed:at_delta].reshape(tokens, num_heads * size)
    delta = scratch[at_delta:at_gate].reshape(tokens, hidden)
    addresses = starts + positions
    # Queries of one key head together, unless threads would be idle.
    together = group if tokens * num_kv_heads >= 2 * num_threads else 1

    for index in range(layers.shape[0]):
        width = layers[index].inner
        gate = scratch[at_gate : at_gate + tokens * width].reshape(tokens, width)
        up = scratch[at_up : at_up + tokens * width].reshape(tokens, width)
        attends = only != MLP and layers[index].has_attention
        if attends:
            for part in prange(num_threads):
                mine = at_normed + part * tokens * hidden
                normed = scratch[mine : mine + tokens * hidden].reshape(tokens, hidden)
                norms(x, layers[index].before_attention, normed)
                first, last = share(units, part, num_threads, 1)
                for unit in range(first, last):
                    _project_head(
                        unit, num_heads, num_kv_heads, layers[index], qkv[index, unit], normed, heads, angles,
                        positions, addresses, interleaved,
                    )  # fmt: skip
            if layers[index].head_norms == ALL_AS_ONE:
                _finish_heads(num_heads, num_kv_heads, layers[index], heads, angles, positions, addresses, interleaved)
            for part in prange(num_threads):
                scores = scratch.ctypes.data + (at_scores + part * group * longest) * 4
                _attend_part(
                    part, num_threads, together, group, num_heads, num_kv_heads, layers[index], heads, mixed,
                    positions, starts, scores,
                )  # fmt: skip
        for step in range(2):
            # Beside attention, the MLP reads x before attention is added to it.
            if width and only != ATTENTION and step != layers[index].is_parallel:
                for part in prange(num_threads):
                    mine = at_normed + part * tokens * hidden
                    normed = scratch[mine : mine + tokens * hidden].reshape(tokens, hidden)
                    norms(x, layers[index].before_mlp, normed)
                    first, last = share(width, part, num_threads, GRAIN)
                    _inner_part(layers[index], normed, gate, up, first, last)
            if step == 0 and attends:
                for part in prange(num_threads):
                    first, last = share(hidden, part, num_threads, GRAIN)
                    layer = layers[index]
                    _add_product(
                        x, layer.out, layer.out_product, layer.out_bias, mixed, delta, first, last, layer.multiplier,
                        layer.after_attention.kind != NONE or only != WHOLE,
                    )  # fmt: skip
                if layers[index].after_attention.kind != NONE and only == WHOLE:
                    _add_normed(x, delta, layers[index].after_attention, layers[index].multiplier)
        if not width or only == ATTENTION:
            continue
        for part in prange(num_threads):
            first, last = share(hidden, part, num_threads, GRAIN)
            layer = layers[index]
            _add_product(
                x, layer.down, layer.down_product, layer.down_bias, gate, delta, first, last, layer.multiplier,
                layer.after_mlp.kind != NONE or only != WHOLE,
            )  # fmt: skip
        if layers[index].after_mlp.kind != NONE and only == WHOLE:
            _add_normed(x, delta, layers[index].after_mlp, layers[index].multiplier)


def delta_of(scratch: Floats, tokens: int, hidden: int, heads: int, kv_heads: int, size: int, threads: int) -> Floats:
    """[tokens, hidden] what a half of the last layer would add to the hidden states."""
    start = tokens * (threads * hidden + 2 * heads * size + 2 * kv_heads * size)
    return scratch[start : start + tokens * hidden].reshape(tokens, hidden)


def scratch_size(
    tokens: int, hidden: int, heads: int, kv_heads: int, size: int, inner: int, longest: int, threads: int
) -> int:
    """Floats of scratch memory `run_stack` needs."""
    wide = threads * hidden + 2 * heads * size + 2 * kv_heads * size + hidden + 2 * inner
    return tokens * wide + threads * (heads // kv_heads) * longest
