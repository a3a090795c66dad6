"""What a decoder layer does between products of a library, for many tokens: threads split the tokens between them.

Each function is one step of `stack.run_stack` for whole activations; what a layer is, is the same data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, prange

from forerun.kernels.cpu.activation import SILU, activate, gated
from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.memory import Floats, Ints, pointer
from forerun.kernels.cpu.norms import NONE, norm
from forerun.kernels.cpu.share import share
from forerun.kernels.cpu.stack import ALL_AS_ONE, OWN_GAINS, rotate

TOGETHER = 32  # tokens of which one head is written after the other: a head's queries lie side by side


@njit(nogil=True, parallel=True, cache=True)
def norm_rows(x: Floats, layers: Any, index: int, is_mlp: bool, out: Floats, num_threads: int) -> None:
    """What attention or the MLP of layer `index` reads: [N, hidden] normed."""
    for part in prange(num_threads):
        first, last = share(x.shape[0], part, num_threads, 1)
        for n in range(first, last):
            if is_mlp:
                norm(x[n], layers[index].before_mlp, out[n])
            else:
                norm(x[n], layers[index].before_attention, out[n])


@njit(nogil=True, parallel=True, cache=True)
def add_rows(x: Floats, delta: Floats, layers: Any, index: int, is_mlp: bool, num_threads: int) -> None:
    """x += what attention or the MLP of layer `index` made, perhaps normed, times the layer's multiplier."""
    for part in prange(num_threads):
        first, last = share(x.shape[0], part, num_threads, 1)
        multiplier = layers[index].multiplier
        for n in range(first, last):
            if is_mlp and layers[index].after_mlp.kind != NONE:
                norm(delta[n], layers[index].after_mlp, delta[n])
            elif not is_mlp and layers[index].after_attention.kind != NONE:
                norm(delta[n], layers[index].after_attention, delta[n])
            for i in range(x.shape[1]):
                x[n, i] += multiplier * delta[n, i]


@njit(nogil=True, parallel=True, cache=True)
def activate_rows(
    products: Floats,  # all that the first products gave
    tokens: int,
    stride: int,  # numbers from one token's to the next one's
    to_up: int,  # numbers from a token's gate to its up, where there are both
    layers: Any,
    index: int,
    num_threads: int,
) -> None:
    """The activation in place, gate times up in the gate's. Biases have been added."""
    for part in prange(num_threads):
        first, last = share(tokens, part, num_threads, 1)
        inner = layers[index].inner
        for n in range(first, last):
            mine, other = products[n * stride :][:inner], products[n * stride + to_up :][:inner]
            if layers[index].is_gated and layers[index].activation == SILU:
                gated(mine, other)
            else:
                activate(mine, layers[index].activation)
                if layers[index].is_gated:
                    for i in range(inner):
                        mine[i] *= other[i]


@njit(nogil=True, parallel=True, cache=True)
def finish_rows(
    heads: Floats,  # of all tokens, as the products made them
    query: Floats,  # [heads, N, size] out
    begins: Ints,  # [heads + 2 kv heads] where query, key, value 0, 1 ... of the first token is in `heads`
    strides: Ints,  # [heads + 2 kv heads] numbers from there to the next token's
    layers: Any,  # [layers] of `stack.LAYER`
    index: int,
    angles: Floats,  # [tables, positions, 2 T]
    positions: Ints,  # [N]
    addresses: Ints,  # [N] where keys and values go in the cache
    interleaved: bool,
    num_kv_heads: int,
    num_threads: int,
) -> None:
    """Norms and rotation of queries and keys; keys and values end in the cache."""
    num_heads, tokens, size = query.shape
    for part in prange(num_threads):
        first, last = share(tokens, part, num_threads, 1)
        for begin in range(first, last, TOGETHER):
            end = min(begin + TOGETHER, last)
            if layers[index].head_norms == ALL_AS_ONE:  # such heads stand in order
                for n in range(begin, end):
                    queries = heads[begins[0] + n * strides[0] :][: num_heads * size]
                    norm(queries, layers[index].query_norm, queries)
                    keys = heads[begins[num_heads] + n * strides[num_heads] :][: num_kv_heads * size]
                    norm(keys, layers[index].key_norm, keys)
            for unit in range(num_heads + 2 * num_kv_heads):
                _finish_unit(
                    unit, begin, end, heads[begins[unit] :], strides[unit], query, layers[index], angles, positions,
                    addresses, interleaved, num_kv_heads,
                )  # fmt: skip


@compiled()
def _finish_unit(
    unit: int,
    begin: int,
    end: int,
    heads: Floats,  # from this unit's first number on
    stride: int,
    query: Floats,
    layer: Any,
    angles: Floats,
    positions: Ints,
    addresses: Ints,
    interleaved: bool,
    num_kv_heads: int,
) -> None:
    """One head of some tokens: `stack._finish_head` without a call for each of them."""
    num_heads, _, size = query.shape
    is_query, is_value = unit < num_heads, unit >= num_heads + num_kv_heads
    head = unit - (0 if is_query else num_heads + num_kv_heads if is_value else num_heads)
    has_norm = layer.head_norms != ALL_AS_ONE and (layer.query_norm.kind if is_query else layer.key_norm.kind) != NONE
    skip = head * size if layer.head_norms == OWN_GAINS else 0
    if has_norm and not is_value:
        for n in range(begin, end):
            part = heads[n * stride :][:size]
            norm(part, layer.query_norm if is_query else layer.key_norm, part, skip)
    if layer.table >= 0 and not is_value:
        for n in range(begin, end):
            rotate(heads[n * stride :][:size], angles[layer.table, positions[n]], interleaved)
    if is_query:
        for n in range(begin, end):
            _copy(heads[n * stride :], query[unit, n])
        return
    pool = carray(
        pointer(layer.values if is_value else layer.keys),
        (addresses[begin:end].max() + 1, num_kv_heads, size),
        np.float32,
    )
    for n in range(begin, end):
        _copy(heads[n * stride :], pool[addresses[n], head])


@compiled()
def _copy(source: Floats, out: Floats) -> None:
    for i in range(len(out)):
        out[i] = source[i]
