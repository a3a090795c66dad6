"""How pointwise loops are compiled: so that they become vector instructions.

Python's division checks for zero in every lane, and a sum in strict order cannot use lanes at all. The order of such a
sum still depends on its length alone, never on what else is computed, so bits stay the same in any batch. NaN and
infinity keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from numba import types

from forerun.kernels.cpu.disk_cache import cfunc, njit

ARGUMENTS = 9  # of a product

compiled = partial(njit, nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"})


def address_of(function: Callable[..., None], arguments: int = ARGUMENTS) -> int:
    """Where a function of whole numbers (addresses, strides, sizes) begins, compiled first where it is not yet."""
    address: int = _called_by_address(function, arguments).address
    return address


@cache
def _called_by_address(function: Callable[..., None], arguments: int) -> Any:
    """Kept, because whoever calls it knows nothing but its address."""
    return cfunc(types.void(*(types.int64,) * arguments), cache=True)(function)
