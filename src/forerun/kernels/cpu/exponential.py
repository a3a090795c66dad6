"""e^x for a whole array in vector instructions; libm's, called once a number, would take longer than the products."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.memory import Floats

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.3)  # below it float32 is subnormal: 0 will do
_HIGHEST = np.float32(88.0)  # and above it nearly infinite


@intrinsic
def _float_of_bits(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        return build.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


# Without reassociation, unlike the loops around it: n * high + n * low must not become n * (high + low), which costs
# digits wherever there is no fused multiply-add. For the same reason Numba must not inline it; LLVM does.
@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def exponential(x: np.float32) -> np.float32:
    """Within 2e-7 relative of e^x. x = n ln 2 + r; a polynomial gives e^r, n goes into the exponent's bits."""
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    e = np.float32(1.9875691500e-4)
    e = e * r + np.float32(1.3981999507e-3)
    e = e * r + np.float32(8.3334519073e-3)
    e = e * r + np.float32(4.1665795894e-2)
    e = e * r + np.float32(1.6666665459e-1)
    e = e * r + np.float32(5.0000001201e-1)
    e = e * r * r + r + np.float32(1)
    return e * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled()
def exponentials(x: Floats) -> None:
    """In place."""
    for i in range(x.shape[0]):
        x[i] = exponential(x[i])


@compiled()
def capped(x: Floats, cap: np.float32) -> None:
    """cap * tanh(x / cap), in place: by its series near 0, where the quotient would lose digits."""
    for i in range(x.shape[0]):
        y = x[i] / cap
        square = y * y
        series = np.float32(62 / 2835) * square - np.float32(17 / 315)
        series = (series * square + np.float32(2 / 15)) * square - np.float32(1 / 3)
        near = y + y * (series * square)
        far = np.float32(1) - np.float32(2) / (np.float32(1) + exponential(np.float32(2) * y))
        x[i] = cap * (near if square < np.float32(0.06) else far)
