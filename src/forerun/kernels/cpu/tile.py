"""The inner loop of every product: a tile of dot products, written in vector instructions.

`tile(4 weight rows, t tokens)` keeps 4 x t sums in registers and reads each weight once. Left to itself a core waits
for memory here: hardware prefetchers follow one stream and a tile reads four, so the tile asks for the lines of the
*next* four rows, which lie right behind, while it works on its own (on a Neoverse N1: 20 -> 34 GB/s on two cores).

Each sum runs over k in the same order whatever t is: LANES partial sums, then a fixed tree. So a token's numbers have
the same bits alone and beside others, which no library's matrix product promises.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 4  # weight rows of a tile; four rows of sixteen bytes are one cache line to prefetch an iteration

_FEATURES = llvmlite.binding.get_host_cpu_features()
_MANY_REGISTERS = not _FEATURES.get("sse2", False) or _FEATURES.get("avx512f", False)
LANES = 8 if _FEATURES.get("avx2", False) else 4  # floats of one vector register
MOST_TOKENS = 6 if _MANY_REGISTERS else 3  # tokens of one tile: ROWS * MOST_TOKENS sums must stay in registers

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = ir.IntType(8).as_pointer()
_TO_LEVEL_2 = (ir.Constant(_I32, 0), ir.Constant(_I32, 2), ir.Constant(_I32, 1))  # read, keep in L2, data


def _tile(rows: int, tokens: int) -> Any:
    """An intrinsic (weights, stride, inputs, stride, sums, stride, size) on addresses; strides and size in floats."""

    @intrinsic
    def tile(typing: Any, w: Any, w_stride: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, size: Any) -> Any:
        signature = types.void(*(types.intp,) * 7)

        def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            _emit(build, rows, tokens, arguments)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _emit(build: Any, rows: int, tokens: int, arguments: Any) -> None:
    """The loop over k, `LANES` floats at a time, and the sums behind it."""
    w, w_stride, x, x_stride, out, out_stride, size = arguments
    fma = _declared(build, f"llvm.fma.v{LANES}f32", _VECTOR, [_VECTOR] * 3)
    prefetch = _declared(build, "llvm.prefetch.p0", ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    weights, inputs = _row_pointers(build, w, w_stride, rows), _row_pointers(build, x, x_stride, tokens)
    behind = build.gep(weights[0], [build.mul(w_stride, _int(rows))])

    entry, loop, done = build.block, build.append_basic_block("tile"), build.append_basic_block("sums")
    build.branch(loop)
    build.position_at_end(loop)
    k = build.phi(_I64)
    k.add_incoming(_int(0), entry)
    sums = [[build.phi(_VECTOR) for _ in range(tokens)] for _ in range(rows)]
    for line in range(max(1, rows * LANES * 4 // 64)):
        ahead = build.gep(behind, [build.add(build.mul(k, _int(rows)), _int(line * 16))])
        build.call(prefetch, [build.bitcast(ahead, _BYTES), *_TO_LEVEL_2])
    ours = [_load(build, pointer, k) for pointer in inputs]
    grown = []
    for pointer, row in zip(weights, sums, strict=True):
        weight = _load(build, pointer, k)
        grown.append([build.call(fma, [weight, mine, total]) for mine, total in zip(ours, row, strict=True)])
    step = build.add(k, _int(LANES))
    k.add_incoming(step, loop)
    for row, new in zip(sums, grown, strict=True):
        for total, after in zip(row, new, strict=True):
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), entry)
            total.add_incoming(after, loop)
    build.cbranch(build.icmp_unsigned("<", step, size), loop, done)

    build.position_at_end(done)
    places = _row_pointers(build, out, out_stride, tokens)
    for r, row in enumerate(grown):
        for place, total in zip(places, row, strict=True):
            build.store(_added_up(build, total), build.gep(place, [_int(r)]), align=4)


def _added_up(build: Any, vector: Any) -> Any:
    parts = [build.extract_element(vector, ir.Constant(_I32, i)) for i in range(LANES)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [build.fadd(parts[i], parts[i + half]) for i in range(half)]
    return parts[0]


def _row_pointers(build: Any, base: Any, stride: Any, count: int) -> list[Any]:
    first = build.inttoptr(base, _F32.as_pointer())
    return [build.gep(first, [build.mul(stride, _int(i))]) for i in range(count)]


def _load(build: Any, pointer: Any, offset: Any) -> Any:
    return build.load(build.bitcast(build.gep(pointer, [offset]), _VECTOR.as_pointer()), align=4)


def _declared(build: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return cgutils.get_or_insert_function(build.module, ir.FunctionType(result, arguments), name)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


_wide_1, _wide_2, _wide_3 = _tile(ROWS, 1), _tile(ROWS, 2), _tile(ROWS, 3)
_wide_4, _wide_5, _wide_6 = _tile(ROWS, 4), _tile(ROWS, 5), _tile(ROWS, 6)
_thin_1, _thin_2, _thin_3 = _tile(1, 1), _tile(1, 2), _tile(1, 3)


@njit(nogil=True, cache=True)
def wide(w: int, w_stride: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int) -> None:
    """ROWS weight rows against `tokens` inputs, in as few tiles as will do, of nearly equal width."""
    tiles = (tokens + MOST_TOKENS - 1) // MOST_TOKENS
    done = 0
    for i in range(tiles):
        width = (tokens * (i + 1)) // tiles - done
        here_x, here_out = x + done * x_stride * 4, out + done * out_stride * 4
        if width == 1:
            _wide_1(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        elif width == 2:
            _wide_2(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        elif width == 3:
            _wide_3(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        elif width == 4:
            _wide_4(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        elif width == 5:
            _wide_5(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        else:
            _wide_6(w, w_stride, here_x, x_stride, here_out, out_stride, size)
        done += width


@njit(nogil=True, cache=True)
def thin(w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int) -> None:
    """One weight row against `tokens` inputs: what is left when the rows are no multiple of ROWS."""
    done = 0
    while done < tokens:
        left = tokens - done
        here_x, here_out = x + done * x_stride * 4, out + done * out_stride * 4
        if left >= 3:
            _thin_3(w, size, here_x, x_stride, here_out, out_stride, size)
            done += 3
        elif left == 2:
            _thin_2(w, size, here_x, x_stride, here_out, out_stride, size)
            done += 2
        else:
            _thin_1(w, size, here_x, x_stride, here_out, out_stride, size)
            done += 1


@njit(nogil=True, cache=True)
def rows_product(
    w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """out[t, n] = sum over k of x[t, k] w[n, k] for n from `first` to `last`; w is dense, addresses are of float32."""
    n = first
    while n + ROWS <= last:
        wide(w + n * size * 4, size, x, x_stride, out + n * 4, out_stride, tokens, size)
        n += ROWS
    while n < last:
        thin(w + n * size * 4, x, x_stride, out + n * 4, out_stride, tokens, size)
        n += 1
