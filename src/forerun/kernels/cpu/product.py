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
from numba import cfunc, literally, njit, types
from numba.extending import intrinsic

from forerun.kernels.cpu.memory import Floats
from forerun.kernels.cpu.tile import MOST_TOKENS, ROWS, thin, wide, widen_row
from forerun.kernels.cpu.widen import FLOAT32, FORMATS, I64, LANES, UNIT, WIDEST

# With more tokens than this, narrow rows are widened once into the cache instead of in every tile; blocks take longer.
IN_PLACE = tuple(MOST_TOKENS if stored.values == UNIT else min(4, MOST_TOKENS) for stored in FORMATS)
# Bytes of weight rows, as float32, that meet all inputs before the next ones. They stay in the L2 cache; with few rows
# (a block of 96 KiB has four of 4096 numbers) inputs would come from further away for every one of them.
BLOCK = 384 << 10
_ARGUMENTS = 9
_RUNS = tuple(stored.run(1) for stored in FORMATS)
_VALUES, _BYTES = tuple(values for values, _ in _RUNS), tuple(size for _, size in _RUNS)


@njit(nogil=True, cache=True)
def rows_product(
    stored: int, w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """out[t, n] = sum over k of x[t, k] w[n, k] for n from `first` to `last`; w is dense, x and out are float32."""
    kind = literally(stored)
    row = size // _VALUES[kind] * _BYTES[kind]
    if kind != FLOAT32 or size % WIDEST == 0:  # `narrow` sees to it that narrow rows are
        _rows(kind, WIDEST, w, row, x, x_stride, out, out_stride, tokens, size, first, last)
    else:
        _rows(kind, LANES, w, row, x, x_stride, out, out_stride, tokens, size, first, last)


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
    n = first
    block = max(ROWS, BLOCK // (size * 4) // ROWS * ROWS)
    if kind != FLOAT32 and tokens > IN_PLACE[kind]:
        dense = np.empty(block * size, np.float32)
        n = _widened_rows(kind, long, dense, w, row, x, x_stride, out, out_stride, tokens, size, first, last, block)
    while n + ROWS <= last:
        rows = min(block, (last - n) // ROWS * ROWS)
        wide(kind, long, w + n * row, row, x, x_stride, out + n * 4, out_stride, tokens, size, rows)
        n += rows
    while n < last:
        thin(kind, long, w + n * row, row, x, x_stride, out + n * 4, out_stride, tokens, size)
        n += 1


@njit(nogil=True, cache=True)
def _widened_rows(
    stored: int,
    lanes: int,
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
    kind, long = literally(stored), literally(lanes)
    at, n = dense.ctypes.data, first
    while n + ROWS <= last:
        rows = min(block, (last - n) // ROWS * ROWS)
        for i in range(rows):
            widen_row(kind, long, w + (n + i) * row, at + i * size * 4, size)
        wide(FLOAT32, long, at, size * 4, x, x_stride, out + n * 4, out_stride, tokens, size, rows)
        n += rows
    return n


def _product_of(stored: int) -> Callable[..., None]:
    def product(
        w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
    ) -> None:
        rows_product(stored, w, x, x_stride, out, out_stride, tokens, size, first, last)

    return product


@cache
def _compiled(stored: int) -> Any:
    return cfunc(types.void(*(types.int64,) * _ARGUMENTS), cache=True)(_product_of(stored))


def product_address(stored: int) -> int:
    """Where the product for a format begins, compiled first where it is not yet."""
    address: int = _compiled(stored).address
    return address


@intrinsic
def multiply(
    typing: Any, product: Any, w: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, tokens: Any, size: Any,
    first: Any, last: Any,
) -> Any:  # fmt: skip
    """`rows_product` by its address, for the format that it was compiled for."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)
        build.call(build.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * (_ARGUMENTS + 1)), codegen
