"""How pointwise loops are compiled: so that they become vector instructions.

Python's division checks for zero in every lane, and a sum in strict order cannot use lanes at all. The order of such a
sum still depends on its length alone, never on what else is computed, so bits stay the same in any batch. NaN and
infinity keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from numba import cfunc, njit, types

compiled = partial(njit, nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"})


@cache
def called_by_address(product: Callable[..., None]) -> Any:
    """A product of nine whole numbers (addresses, strides, sizes) as others call it: by its `address`, and kept."""
    return cfunc(types.void(*(types.int64,) * 9), cache=True)(product)
