"""Rows of a weight times few inputs, compiled once for each format a weight may be stored in.

A fused stack calls products by their address, which comes with the address of the weight. So it is compiled once for
all formats, and a format that no model on this machine uses is never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import literally, types
from numba.extending import intrinsic

from forerun.kernels.cpu.compiled import ARGUMENTS, address_of
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import I64
from forerun.kernels.cpu.memory import Floats
from forerun.kernels.cpu.tile import MOST_TOKENS, ROWS, thin, wide, widen_row
from forerun.kernels.cpu.widen import FLOAT32, FORMATS, LANES, UNIT, WIDEST

# Tokens of a tile: scales and numbers of a block need registers beside the sums.
TILE = tuple(MOST_TOKENS if stored.values == UNIT else min(4, MOST_TOKENS) for stored in FORMATS)
# With more tokens than this, narrow rows are widened once into the cache instead of in every tile.
IN_PLACE = tuple(tile if stored.values == UNIT else 2 * tile for stored, tile in zip(FORMATS, TILE, strict=True))
# Bytes of weight rows, as float32, that meet all inputs before the next ones. They stay in the L2 cache; with few rows
# (a block of 96 KiB has four of 4096 numbers) inputs would come from further away for every one of them.
BLOCK = 384 << 10
_RUNS = tuple(stored.run(1) for stored in FORMATS)
_VALUES, _BYTES = tuple(values for values, _ in _RUNS), tuple(size for _, size in _RUNS)


# The functions below are compiled once for each constant they are given, with all branches: what a format never does
# is no branch of its function.


def _float_product(
    w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """out[t, n] = sum over k of x[t, k] w[n, k] for n from `first` to `last`; w is dense, all are float32."""
    if size % WIDEST == 0:
        _rows(FLOAT32, WIDEST, w, size * 4, x, x_stride, out, out_stride, tokens, size, first, last)
    else:
        _rows(FLOAT32, LANES, w, size * 4, x, x_stride, out, out_stride, tokens, size, first, last)


@njit(nogil=True, cache=True)
def _narrow_product(
    stored: int, w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """The same for a weight in another format, whose rows `narrow` has seen to be multiples of WIDEST."""
    kind = literally(stored)
    row = size // _VALUES[kind] * _BYTES[kind]
    n = first
    if tokens > IN_PLACE[kind]:
        block = _block(size)
        dense = np.empty(block * size, np.float32)
        n = _widened_rows(kind, dense, w, row, x, x_stride, out, out_stride, tokens, size, first, last, block)
    _rows(kind, WIDEST, w, row, x, x_stride, out, out_stride, tokens, size, n, last)


@njit(nogil=True, cache=True)
def _block(size: int) -> int:
    """Rows that meet all inputs before the next ones."""
    return max(ROWS, BLOCK // (size * 4) // ROWS * ROWS)


@njit(nogil=True, cache=True)
def _rows(
    stored: int,
    lanes: int,
    w: int,
    row: int,  # bytes
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    tokens: int,
    size: int,
    first: int,
    last: int,
) -> None:
    kind, long = literally(stored), literally(lanes)
    n, block = first, _block(size)
    while n + ROWS <= last:
        rows = min(block, (last - n) // ROWS * ROWS)
        wide(kind, long, w + n * row, row, x, x_stride, out + n * 4, out_stride, tokens, size, rows, TILE[kind])
        n += rows
    while n < last:
        thin(kind, long, w + n * row, row, x, x_stride, out + n * 4, out_stride, tokens, size)
        n += 1


@njit(nogil=True, cache=True)
def _widened_rows(
    stored: int,
    dense: Floats,  # room for `block` of them
    w: int,
    row: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    tokens: int,
    size: int,
    first: int,
    last: int,
    block: int,
) -> int:
    """The same by way of float32 copies, up to the row that it returns.

    A function of its own because its caller holds `dense`: Numba frees an array behind the last line that names it,
    and an address names nothing.
    """
    kind = literally(stored)
    at, n = dense.ctypes.data, first
    while n + ROWS <= last:
        rows = min(block, (last - n) // ROWS * ROWS)
        for i in range(rows):
            widen_row(kind, WIDEST, w + (n + i) * row, at + i * size * 4, size)
        wide(FLOAT32, WIDEST, at, size * 4, x, x_stride, out + n * 4, out_stride, tokens, size, rows)
        n += rows
    return n


@cache
def _product_of(stored: int) -> Callable[..., None]:
    def product(
        w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
    ) -> None:
        _narrow_product(stored, w, x, x_stride, out, out_stride, tokens, size, first, last)

    return product if stored != FLOAT32 else _float_product


def product_address(stored: int) -> int:
    """Where the product for a format begins, compiled first where it is not yet."""
    return address_of(_product_of(stored))


@intrinsic
def multiply(
    typing: Any, product: Any, w: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, tokens: Any, size: Any,
    first: Any, last: Any,
) -> Any:  # fmt: skip
    """A product by its address, for the format that it was compiled for."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * ARGUMENTS)
        build.call(build.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * (ARGUMENTS + 1)), codegen
