"""Float32 memory by address inside compiled code: weights stay where torch keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from forerun.kernels.cpu import emit
from forerun.kernels.cpu.compiled import compiled

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address (an integer) as a pointer for `numba.carray`."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        return build.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address; one that belongs to nobody does no harm."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        emit.prefetch(build, build.inttoptr(arguments[0], emit.BYTES))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@compiled()
def add_at(x: Floats, address: int) -> None:
    """x plus the numbers that lie at an address, in place."""
    more = carray(pointer(address), (x.shape[0],), np.float32)
    for i in range(x.shape[0]):
        x[i] += more[i]


@compiled()
def write_at(x: Floats, address: int) -> None:
    """x to an address. A loop: Numba takes four seconds to compile `out[:] = x`, with its errors for every misfit."""
    out = carray(pointer(address), (x.shape[0],), np.float32)
    for i in range(x.shape[0]):
        out[i] = x[i]
