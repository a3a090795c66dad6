"""How pointwise loops are compiled: so that they become vector instructions.

Python's division checks for zero in every lane, and a sum in strict order cannot use lanes at all. The order of such a
sum still depends on its length alone, never on what else is computed, so bits stay the same in any batch. NaN and
infinity keep their meaning.
"""

from __future__ import annotations

from functools import partial

from numba import njit

compiled = partial(njit, nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"})
