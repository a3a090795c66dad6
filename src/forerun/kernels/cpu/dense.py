"""Float32 copies of weights that are stored narrow, for products of a library: one pass over the stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import literally, prange, types
from numba.extending import intrinsic

from forerun.kernels.cpu.compiled import address_of
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import I64
from forerun.kernels.cpu.share import share
from forerun.kernels.cpu.threads import turn
from forerun.kernels.cpu.tile import widen_row
from forerun.kernels.cpu.widen import FORMATS, WIDEST

_ARGUMENTS = 3  # of a function that widens: address of the bytes, address of the floats, number of values
_RUNS = tuple(stored.run(WIDEST) for stored in FORMATS)


def can_widen(stored: int, size: int) -> bool:
    """Whether rows of `size` values are whole turns of the loop."""
    return size > 0 and size % _RUNS[stored][0] == 0


def widen(stored: int, raw: int, out: int, rows: int, size: int, num_threads: int) -> None:
    """Rows that lie side by side at address `raw`, as float32 at address `out`; see `can_widen`."""
    values, length = _RUNS[stored]
    widener = address_of(_widener(stored), _ARGUMENTS)
    with turn(num_threads):
        _widen(widener, raw, out, rows, size, size // values * length, num_threads)


@njit(nogil=True, parallel=True, cache=True)
def _widen(widener: int, raw: int, out: int, rows: int, size: int, row: int, num_threads: int) -> None:
    for part in prange(num_threads):
        first, last = share(rows, part, num_threads, 1)
        if first < last:  # its loop has one turn at least
            _call(widener, raw + first * row, out + first * size * 4, (last - first) * size)


@intrinsic
def _call(typing: Any, widener: Any, raw: Any, out: Any, size: Any) -> Any:
    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)
        build.call(build.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * (_ARGUMENTS + 1)), codegen


@cache
def _widener(stored: int) -> Callable[[int, int, int], None]:
    """Compiled once for each format that is used."""

    def widened(raw: int, out: int, size: int) -> None:
        _widened(stored, raw, out, size)

    return widened


@njit(nogil=True, cache=True)
def _widened(stored: int, raw: int, out: int, size: int) -> None:
    kind = literally(stored)
    widen_row(kind, WIDEST, raw, out, size)
