"""All decoder layers of a Whisper in one call: no Python, no allocation, six parallel regions a layer.

The layer as transformers' modules define it: x += o(attention(qkv(norm(x)))); x += o(cross(q(norm(x)))); x +=
fc2(gelu(fc1(norm(x)))). Threads split heads where attention is near, rows of a weight elsewhere. New keys and values
go straight into the ragged cache; those of the sources were made when they were read.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange

from forerun.kernels.cpu.activation import gelus
from forerun.kernels.cpu.attention import MOST_QUERIES, attend
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.memory import Floats, Ints, add_at, pointer, write_at
from forerun.kernels.cpu.norms import centred_norm
from forerun.kernels.cpu.product import multiply
from forerun.kernels.cpu.share import GRAIN, share

# Columns of `weights`: where each lies, and the address of its product (`product`), which norms and biases do not have.
# Whisper's keys have no bias.
NAMES = (
    "norm", "norm_bias", "q", "q_bias", "k", "v", "v_bias", "out", "out_bias",
    "cross_norm", "cross_norm_bias", "cross_q", "cross_q_bias", "cross_out", "cross_out_bias",
    "mlp_norm", "mlp_norm_bias", "up", "up_bias", "down", "down_bias",
)  # fmt: skip
(
    NORM, NORM_BIAS, Q, Q_BIAS, K, V, V_BIAS, OUT, OUT_BIAS, CROSS_NORM, CROSS_NORM_BIAS, CROSS_Q, CROSS_Q_BIAS,
    CROSS_OUT, CROSS_OUT_BIAS, MLP_NORM, MLP_NORM_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS,
) = range(len(NAMES))  # fmt: skip


@njit(nogil=True, cache=True)
def norms(x: Floats, weight: int, bias: int, out: Floats, epsilon: np.float32) -> None:
    """LayerNorm of every row; `out` may be `x`."""
    for n in range(x.shape[0]):
        centred_norm(x[n], weight, bias, epsilon, np.float32(0), out[n])


@njit(nogil=True, cache=True)
def _head(weight: Ints, bias: int, head: int, normed: Floats, out: Floats) -> None:
    """One head of a projection for all tokens: [N, hidden] -> [N, size]."""
    tokens, hidden = normed.shape
    size = out.shape[1]
    first = head * size
    multiply(
        weight[1], weight[0], normed.ctypes.data, hidden, out.ctypes.data - first * 4, size, tokens, hidden, first,
        first + size,
    )  # fmt: skip
    if bias:
        for n in range(tokens):
            add_at(out[n], bias + head * size * 4)


@njit(nogil=True, cache=True)
def _self_head(
    head: int, w: Ints, normed: Floats, work: Floats, mixed: Floats, cache: Ints, positions: Ints, starts: Ints,
    scale: np.float32, scores: int,
) -> None:  # fmt: skip
    """One head's queries, keys and values, the latter into the cache, and its attention."""
    tokens, hidden = mixed.shape
    size = work.shape[2]
    heads = hidden // size
    q = work[0]
    _head(w[Q], w[Q_BIAS, 0], head, normed, q)
    for which in range(2):
        new = work[1]
        _head(w[V] if which else w[K], w[V_BIAS, 0] if which else 0, head, normed, new)
        for n in range(tokens):
            place = cache[which] + ((starts[n] + positions[n]) * heads + head) * size * 4
            write_at(new[n], place)
    for n in range(tokens):
        row = (starts[n] * heads + head) * size * 4
        attend(
            q[n].ctypes.data, cache[0] + row, cache[1] + row, mixed.ctypes.data + (n * hidden + head * size) * 4,
            1, size, hidden, positions[n] + 1, scale, scores,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _cross_head(
    head: int, w: Ints, normed: Floats, work: Floats, mixed: Floats, source: Ints, runs: Ints, scale: np.float32,
    scores: int,
) -> None:  # fmt: skip
    """One head's attention over the sources; `runs` are (first token, last, where the source begins, its length)."""
    size, hidden = work.shape[2], mixed.shape[1]
    q, out = work[0], work[1]
    _head(w[CROSS_Q], w[CROSS_Q_BIAS, 0], head, normed, q)
    for run in range(runs.shape[0]):
        first, last, start, length = runs[run]
        at = (start * hidden + head * size) * 4
        while first < last:
            count = min(MOST_QUERIES, last - first)
            attend(
                q[first].ctypes.data, source[0] + at, source[1] + at, out[first].ctypes.data, count, size, hidden,
                length, scale, scores,
            )  # fmt: skip
            first += count
    for n in range(mixed.shape[0]):
        for i in range(size):
            mixed[n, head * size + i] = out[n, i]


@njit(nogil=True, cache=True)
def _add_product(x: Floats, weight: Ints, bias: int, source: Floats, delta: Floats, first: int, last: int) -> None:
    """Columns `first` to `last` of x += source @ weight.T + bias."""
    tokens, width = source.shape
    hidden = x.shape[1]
    multiply(weight[1], weight[0], source.ctypes.data, width, delta.ctypes.data, hidden, tokens, width, first, last)
    more = carray(pointer(bias), (hidden,), np.float32)
    for n in range(tokens):
        for i in range(first, last):
            x[n, i] += delta[n, i] + more[i]


@njit(nogil=True, parallel=True, cache=True)
def run_decoder(
    x: Floats,  # [N, hidden]: embeddings in, last hidden states (before the final norm) out
    weights: Ints,  # [layers, 21, 2] addresses of weights and of their products
    caches: Ints,  # [layers, 2] addresses of the layer's keys and values [slots, capacity, heads, size]
    sources: Ints,  # [layers, 2] the same of what cross-attention reads
    positions: Ints,  # [N]
    starts: Ints,  # [N] where the token's row begins: slot * capacity
    runs: Ints,  # [R, 4] tokens that read the same source: first, last, where it begins (slot * capacity), its length
    normed: Floats,  # [threads, N, hidden]
    work: Floats,  # [threads, 2, N, size]
    mixed: Floats,  # [N, hidden]
    delta: Floats,  # [N, hidden]
    middle: Floats,  # [N, intermediate]
    scores: Floats,  # [threads, MOST_QUERIES * longest]
    scale: np.float32,
    epsilon: np.float32,
) -> None:
    threads, tokens, hidden = normed.shape
    heads, intermediate = hidden // work.shape[3], middle.shape[1]
    for layer in range(weights.shape[0]):
        w = weights[layer]
        for part in prange(threads):
            norms(x, w[NORM, 0], w[NORM_BIAS, 0], normed[part], epsilon)
            for head in range(part, heads, threads):
                _self_head(
                    head, w, normed[part], work[part], mixed, caches[layer], positions, starts, scale,
                    scores[part].ctypes.data,
                )  # fmt: skip
        for part in prange(threads):
            first, last = share(hidden, part, threads, GRAIN)
            _add_product(x, w[OUT], w[OUT_BIAS, 0], mixed, delta, first, last)
        for part in prange(threads):
            norms(x, w[CROSS_NORM, 0], w[CROSS_NORM_BIAS, 0], normed[part], epsilon)
            for head in range(part, heads, threads):
                _cross_head(
                    head, w, normed[part], work[part], mixed, sources[layer], runs, scale, scores[part].ctypes.data
                )
        for part in prange(threads):
            first, last = share(hidden, part, threads, GRAIN)
            _add_product(x, w[CROSS_OUT], w[CROSS_OUT_BIAS, 0], mixed, delta, first, last)
        for part in prange(threads):
            norms(x, w[MLP_NORM, 0], w[MLP_NORM_BIAS, 0], normed[part], epsilon)
            first, last = share(intermediate, part, threads, GRAIN)
            multiply(
                w[UP, 1],
                w[UP, 0],
                normed[part].ctypes.data,
                hidden,
                middle.ctypes.data,
                intermediate,
                tokens,
                hidden,
                first,
                last,
            )
            for n in range(tokens):
                add_at(middle[n, first:last], w[UP_BIAS, 0] + first * 4)
                gelus(middle[n, first:last])
        for part in prange(threads):
            first, last = share(hidden, part, threads, GRAIN)
            _add_product(x, w[DOWN], w[DOWN_BIAS, 0], middle, delta, first, last)
