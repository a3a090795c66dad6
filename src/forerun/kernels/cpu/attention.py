"""Attention of one new token over its row's keys, for the query heads that share one key head."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from forerun.kernels.cpu import emit
from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import BYTES, F32, I32, I64, Loop, floats, fma, load, row_pointers, whole
from forerun.kernels.cpu.exponential import capped, exponential, exponentials
from forerun.kernels.cpu.memory import Floats, pointer, prefetch
from forerun.kernels.cpu.tile import ROWS, thin, wide
from forerun.kernels.cpu.widen import FLOAT32, LANES

MOST_QUERIES = 4  # query heads mixed at once
CHUNK = 4 * LANES  # floats of a value mixed at once
# Keys of one head lie a stride apart, which hardware prefetchers do not follow: lines are asked for so many keys early.
AHEAD = 12
LINE = 16  # floats of a cache line


def _mixer(vectors: int, queries: int) -> Any:
    """An intrinsic (values, stride, shares, stride, out, stride, keys): out[q] = sum over keys of share[q] * value."""

    @intrinsic
    def mix(typing: Any, v: Any, v_stride: Any, p: Any, p_stride: Any, out: Any, out_stride: Any, keys: Any) -> Any:
        signature = types.void(*(types.intp,) * 7)

        def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            _emit_mix(build, vectors, queries, arguments)
            return context.get_dummy_value()

        return signature, codegen

    return mix


def _emit_mix(build: Any, vectors: int, queries: int, arguments: Any) -> None:
    """Keys one after the other: `vectors` x `queries` sums stay in registers, each value is read once."""
    v, v_stride, p, p_stride, out, out_stride, keys = arguments
    vector = floats(LANES)
    first = build.inttoptr(v, F32.as_pointer())
    shares = row_pointers(build, p, p_stride, queries)
    loop = Loop.begin(build, "mix")
    key = build.phi(I64)
    sums = [[build.phi(vector) for _ in range(vectors)] for _ in range(queries)]
    row = build.gep(first, [build.mul(key, v_stride)])
    ahead = build.gep(first, [build.mul(build.add(key, whole(AHEAD)), v_stride)])
    emit.prefetch(build, build.bitcast(ahead, BYTES))
    value = [load(build, row, i * LANES, vector, align=4) for i in range(vectors)]
    grown = []
    for share, totals in zip(shares, sums, strict=True):
        weight = build.load(build.gep(share, [key]), align=4)
        spread = ir.Constant(vector, ir.Undefined)
        for lane in range(LANES):
            spread = build.insert_element(spread, weight, ir.Constant(I32, lane))
        grown.append([fma(build, spread, part, total) for part, total in zip(value, totals, strict=True)])
    loop.end(build, [(key, build.add(key, whole(1)))], keys, (sums, grown))
    for place, news in zip(row_pointers(build, out, out_stride, queries), grown, strict=True):
        for i, new in enumerate(news):
            there = build.bitcast(build.gep(place, [whole(i * LANES)]), vector.as_pointer())
            build.store(new, there, align=4)


_chunk_1, _chunk_2, _chunk_3, _chunk_4 = _mixer(4, 1), _mixer(4, 2), _mixer(4, 3), _mixer(4, 4)
_small_1 = _mixer(1, 1)


@njit(nogil=True, cache=True)
def attend(
    q: int,
    k: int,
    v: int,
    out: int,
    heads: int,
    size: int,
    key_stride: int,
    keys: int,
    scale: float,
    scores: int,
    softcap: float = 0.0,
    sinks: int = 0,
    by_distance: int = 0,
    distances: int = 0,
) -> None:
    """`heads` queries that lie side by side at `q`, against `keys` keys from `k` on; `scores` has room for them.

    `softcap`, `sinks` [heads] and `by_distance` [heads, distances] are `math.attention.Scale`'s, 0 where there is none;
    distances count from the last key.
    """
    key = 0
    while key + ROWS <= keys:
        for row in range(key + AHEAD, key + AHEAD + ROWS):
            for line in range(0, size, LINE):
                prefetch(k + (row * key_stride + line) * 4)
        wide(FLOAT32, LANES, k + key * key_stride * 4, key_stride * 4, q, size, scores + key * 4, keys, heads, size)
        key += ROWS
    while key < keys:
        thin(FLOAT32, LANES, k + key * key_stride * 4, key_stride * 4, q, size, scores + key * 4, keys, heads, size)
        key += 1
    for h in range(heads):
        row = carray(pointer(scores + h * keys * 4), (keys,), np.float32)
        if softcap > 0 or by_distance:
            for i in range(keys):
                row[i] *= np.float32(scale)
            if softcap > 0:
                capped(row, np.float32(softcap))
            if by_distance:
                _add_by_distance(row, by_distance + h * distances * 4, distances)
            _softmax(row, np.float32(1), sinks + h * 4 if sinks else 0)
        else:
            _softmax(row, np.float32(scale), sinks + h * 4 if sinks else 0)
    _mix(v, key_stride, scores, out, heads, size, keys)


@compiled()
def _softmax(row: Floats, scale: np.float32, sink: int) -> None:
    """Of a row times `scale`; a score at the address `sink` has its share, which goes to no key."""
    keys = row.shape[0]
    peak = np.float32(-np.inf)
    for i in range(keys):
        row[i] *= scale
        peak = max(peak, row[i])
    total = np.float32(0)
    if sink:
        extra = carray(pointer(sink), (1,), np.float32)[0]
        peak = max(peak, extra)
        total = exponential(extra - peak)
    for i in range(keys):
        row[i] -= peak
    exponentials(row)
    for i in range(keys):
        total += row[i]
    share = np.float32(1) / total
    for i in range(keys):
        row[i] *= share


@compiled()
def _add_by_distance(row: Floats, table: int, distances: int) -> None:
    keys, more = row.shape[0], carray(pointer(table), (distances,), np.float32)
    for i in range(keys):
        row[i] += more[min(keys - 1 - i, distances - 1)]


@njit(nogil=True, cache=True)
def _mix(v: int, v_stride: int, p: int, out: int, heads: int, size: int, keys: int) -> None:
    h = 0
    while h < heads:
        queries = min(MOST_QUERIES, heads - h)
        weights, place = p + h * keys * 4, out + h * size * 4
        d = 0
        while d + CHUNK <= size:
            if queries == 1:
                _chunk_1(v + d * 4, v_stride, weights, keys, place + d * 4, size, keys)
            elif queries == 2:
                _chunk_2(v + d * 4, v_stride, weights, keys, place + d * 4, size, keys)
            elif queries == 3:
                _chunk_3(v + d * 4, v_stride, weights, keys, place + d * 4, size, keys)
            else:
                _chunk_4(v + d * 4, v_stride, weights, keys, place + d * 4, size, keys)
            d += CHUNK
        while d < size:
            for i in range(queries):
                _small_1(v + d * 4, v_stride, weights + i * keys * 4, keys, place + (i * size + d) * 4, size, keys)
            d += LANES
        h += queries
