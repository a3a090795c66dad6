"""All decoder layers of a Llama-like model in one call: no Python, no allocation, five parallel regions a layer.

The layer as transformers' modules define it: x += o(attention(rotary(qkv(norm(x))))); x += down(silu(gate(norm(x))) *
up(norm(x))). Threads split the rows of a weight between them; small pointwise work is done by whoever needs its result.
New keys and values go straight into the ragged cache. Every number of a token depends on that token's row alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, prange

from forerun.kernels.cpu.attention import attend
from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.exponential import gated
from forerun.kernels.cpu.memory import Floats, Ints, pointer
from forerun.kernels.cpu.share import share
from forerun.kernels.cpu.tile import ROWS, rows_product

# Columns of `weights`: addresses of float32 tensors, 0 where the model has none.
NAMES = (
    "input_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down",
    "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias",
)  # fmt: skip
IN_NORM, Q, K, V, OUT, MLP_NORM, GATE, UP, DOWN, Q_NORM, K_NORM, Q_BIAS, K_BIAS, V_BIAS, OUT_BIAS = range(len(NAMES))


@compiled()
def _norm(x: Floats, weight: int, out: Floats, epsilon: np.float32) -> None:
    """RMSNorm of one vector."""
    gain = carray(pointer(weight), (x.shape[0],), np.float32)
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = gain[i] * (x[i] * factor)


@compiled()
def norms(x: Floats, weight: int, out: Floats, epsilon: np.float32) -> None:
    """RMSNorm of every row; `out` may be `x`."""
    for n in range(x.shape[0]):
        _norm(x[n], weight, out[n], epsilon)


@compiled()
def _finish_head(head: Floats, bias: int, norm: int, epsilon: np.float32, cos: Floats, sin: Floats, turn: bool) -> None:
    """What happens to one head of one token behind the product: bias, norm, rotary."""
    size = head.shape[0]
    if bias:
        more = carray(pointer(bias), (size,), np.float32)
        for i in range(size):
            head[i] += more[i]
    if norm:
        _norm(head, norm, head, epsilon)
    if turn:
        half = size // 2
        for i in range(half):
            low, high = head[i], head[half + i]
            head[i] = low * cos[i] - high * sin[i]
            head[half + i] = high * cos[half + i] + low * sin[half + i]


@njit(nogil=True, cache=True)
def _project_head(
    unit: int,
    num_heads: int,
    num_kv_heads: int,
    w: Ints,
    normed: Floats,
    q: Floats,
    kv: Floats,
    cos: Floats,
    sin: Floats,
    positions: Ints,
    addresses: Ints,
    cache: Ints,
    epsilon: np.float32,
) -> None:
    """One head of q, k or v for all tokens; keys and values end in the cache."""
    tokens, hidden = normed.shape
    size = cos.shape[1]
    kind, head = Q, unit
    if unit >= num_heads:
        kind, head = (K, unit - num_heads) if unit < num_heads + num_kv_heads else (V, unit - num_heads - num_kv_heads)
    out = q if kind == Q else kv
    column = (head if kind == Q else unit - num_heads) * size
    width = out.shape[1]
    address = w[kind] + head * size * hidden * 4
    rows_product(address, normed.ctypes.data, hidden, out.ctypes.data + column * 4, width, tokens, hidden, 0, size)
    bias = w[Q_BIAS] if kind == Q else (w[K_BIAS] if kind == K else w[V_BIAS])
    if bias:
        bias += head * size * 4
    norm = w[Q_NORM] if kind == Q else (w[K_NORM] if kind == K else 0)
    for n in range(tokens):
        part = out[n, column : column + size]
        _finish_head(part, bias, norm, epsilon, cos[positions[n]], sin[positions[n]], kind != V)
        if kind != Q:
            place = cache[0 if kind == K else 1] + (addresses[n] * num_kv_heads + head) * size * 4
            carray(pointer(place), (size,), np.float32)[:] = part


@njit(nogil=True, parallel=True, cache=True)
def run_stack(
    x: Floats,  # [N, hidden] float32: embeddings in, last hidden states (before the final norm) out
    weights: Ints,  # [layers, 15] int64 addresses
    caches: Ints,  # [layers, 2] int64 addresses of the layer's keys and values [slots, capacity, kv heads, size]
    windows: Ints,  # [layers] int64, 0 where all keys are seen
    positions: Ints,  # [N] int64
    starts: Ints,  # [N] int64, where the token's row begins: slot * capacity
    cos: Floats,  # [positions, size] float32
    sin: Floats,
    num_heads: int,
    num_kv_heads: int,
    intermediate: int,
    scale: np.float32,
    epsilon: np.float32,
    num_threads: int,
    scratch: Floats,  # float32
) -> None:
    tokens, hidden = x.shape
    size = cos.shape[1]
    group = num_heads // num_kv_heads
    longest = positions.max() + 1
    # Where each buffer of the scratch memory begins.
    at_normed = 0
    at_q = at_normed + num_threads * tokens * hidden
    at_kv = at_q + tokens * num_heads * size
    at_mixed = at_kv + tokens * 2 * num_kv_heads * size
    at_delta = at_mixed + tokens * num_heads * size
    at_gate = at_delta + tokens * hidden
    at_up = at_gate + tokens * intermediate
    at_scores = at_up + tokens * intermediate
    q = scratch[at_q:at_kv].reshape(tokens, num_heads * size)
    kv = scratch[at_kv:at_mixed].reshape(tokens, 2 * num_kv_heads * size)
    mixed = scratch[at_mixed:at_delta].reshape(tokens, num_heads * size)
    delta = scratch[at_delta:at_gate].reshape(tokens, hidden)
    gate = scratch[at_gate:at_up].reshape(tokens, intermediate)
    up = scratch[at_up:at_scores].reshape(tokens, intermediate)
    addresses = starts + positions
    # Queries of one key head together, unless threads would be idle.
    together = group if tokens * num_kv_heads >= 2 * num_threads else 1
    units = tokens * (num_heads // together)

    for layer in range(weights.shape[0]):
        w, cache, window = weights[layer], caches[layer], windows[layer]
        for part in prange(num_threads):
            mine = at_normed + part * tokens * hidden
            normed = scratch[mine : mine + tokens * hidden].reshape(tokens, hidden)
            norms(x, w[IN_NORM], normed, epsilon)
            first, last = share(num_heads + 2 * num_kv_heads, part, num_threads, 1)
            for unit in range(first, last):
                _project_head(
                    unit, num_heads, num_kv_heads, w, normed, q, kv, cos, sin, positions, addresses, cache, epsilon
                )
        for part in prange(num_threads):
            scores = scratch.ctypes.data + (at_scores + part * group * longest) * 4
            for unit in range(part, units, num_threads):
                n, head = unit % tokens, unit // tokens * together
                first = max(0, positions[n] + 1 - window) if window else 0
                column = n * num_heads * size + head * size
                offset = ((starts[n] + first) * num_kv_heads + head // group) * size * 4
                attend(
                    q.ctypes.data + column * 4, cache[0] + offset, cache[1] + offset, mixed.ctypes.data + column * 4,
                    together, size, num_kv_heads * size, positions[n] + 1 - first, scale, scores,
                )  # fmt: skip
        for part in prange(num_threads):
            first, last = share(hidden, part, num_threads, ROWS)
            _add_product(x, w[OUT], w[OUT_BIAS], mixed, delta, first, last)
        for part in prange(num_threads):
            mine = at_normed + part * tokens * hidden
            normed = scratch[mine : mine + tokens * hidden].reshape(tokens, hidden)
            norms(x, w[MLP_NORM], normed, epsilon)
            first, last = share(intermediate, part, num_threads, ROWS)
            source = normed.ctypes.data
            rows_product(w[GATE], source, hidden, gate.ctypes.data, intermediate, tokens, hidden, first, last)
            rows_product(w[UP], source, hidden, up.ctypes.data, intermediate, tokens, hidden, first, last)
            for n in range(tokens):
                gated(gate[n, first:last], up[n, first:last])
        for part in prange(num_threads):
            first, last = share(hidden, part, num_threads, ROWS)
            _add_product(x, w[DOWN], 0, gate, delta, first, last)


@njit(nogil=True, cache=True)
def _add_product(x: Floats, weight: int, bias: int, source: Floats, delta: Floats, first: int, last: int) -> None:
    """Columns `first` to `last` of x += source @ weight.T (+ bias)."""
    tokens, width = source.shape
    hidden = x.shape[1]
    rows_product(weight, source.ctypes.data, width, delta.ctypes.data, hidden, tokens, width, first, last)
    for n in range(tokens):
        for i in range(first, last):
            x[n, i] += delta[n, i]
    if bias:
        more = carray(pointer(bias), (hidden,), np.float32)
        for n in range(tokens):
            for i in range(first, last):
                x[n, i] += more[i]


def scratch_size(
    tokens: int, hidden: int, heads: int, kv_heads: int, size: int, intermediate: int, longest: int, threads: int
) -> int:
    """Floats of scratch memory `run_stack` needs."""
    wide = threads * hidden + 2 * heads * size + 2 * kv_heads * size + hidden + 2 * intermediate
    return tokens * wide + threads * (heads // kv_heads) * longest
