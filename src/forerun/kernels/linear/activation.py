"""Device code of an MLP's activation; the reference is `math.skinny.activated`."""

import triton
import triton.language as tl

from forerun.math.skinny import Activation

SILU = tl.constexpr(int(Activation.SILU))
GELU = tl.constexpr(int(Activation.GELU))
GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
RELU = tl.constexpr(int(Activation.RELU))
RELU_SQUARED = tl.constexpr(int(Activation.RELU_SQUARED))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """float32 -> float32."""
    if ACTIVATION == SILU:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        # x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == RELU:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == RELU_SQUARED:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x
