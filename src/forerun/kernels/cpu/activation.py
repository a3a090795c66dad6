"""What an MLP does between its products, in place; the references are `math.skinny.activated` and `gated`."""

from __future__ import annotations

import numpy as np

from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.exponential import exponential
from forerun.kernels.cpu.memory import Floats
from forerun.math.skinny import Activation

SILU, GELU, GELU_TANH = int(Activation.SILU), int(Activation.GELU), int(Activation.GELU_TANH)
RELU, RELU_SQUARED = int(Activation.RELU), int(Activation.RELU_SQUARED)


@njit(nogil=True, cache=True)
def activate(x: Floats, activation: int) -> None:
    if activation == SILU:
        silus(x)
    elif activation == GELU:
        gelus(x)
    elif activation == GELU_TANH:
        tanh_gelus(x)
    elif activation == RELU or activation == RELU_SQUARED:
        relus(x, activation == RELU_SQUARED)


@compiled()
def silus(x: Floats) -> None:
    for i in range(x.shape[0]):
        x[i] = x[i] / (np.float32(1) + exponential(-x[i]))


@compiled()
def gated(gate: Floats, up: Floats) -> None:
    """gate = silu(gate) * up."""
    for i in range(gate.shape[0]):
        gate[i] = gate[i] / (np.float32(1) + exponential(-gate[i])) * up[i]


@compiled()
def gelus(x: Floats) -> None:
    """x times the normal distribution's mass below x.

    The mass of the tail is e^(-z^2) t P(t) with z = |x| / sqrt(2) and t = 1 / (1 + z / 2). P was fitted over z < 9.6
    for the least relative error, 4.3e-8: small values far below zero keep their digits, which 1 + erf would lose.
    """
    for i in range(x.shape[0]):
        z = abs(x[i]) * np.float32(0.7071067811865476)
        t = np.float32(1) / (np.float32(1) + np.float32(0.5) * z)
        p = np.float32(-0.029464051) * t + np.float32(0.14194383)
        p = (p * t - np.float32(0.24288782)) * t + np.float32(0.13821757)
        p = (p * t - np.float32(0.012749191)) * t + np.float32(0.101104)
        p = (p * t + np.float32(0.12161273)) * t + np.float32(0.14117923)
        tail = (p * t + np.float32(0.1410437)) * t * exponential(-z * z)
        x[i] = x[i] * (np.float32(1) - tail) if x[i] >= 0 else x[i] * tail


@compiled()
def tanh_gelus(x: Floats) -> None:
    """x (1 + tanh(u)) / 2 = x / (1 + e^(-2 u))."""
    for i in range(x.shape[0]):
        cubed = x[i] + np.float32(0.044715) * x[i] * x[i] * x[i]
        x[i] = x[i] / (np.float32(1) + exponential(np.float32(-1.5957691216057308) * cubed))


@compiled()
def relus(x: Floats, squared: bool) -> None:
    for i in range(x.shape[0]):
        kept = max(x[i], np.float32(0))
        x[i] = kept * kept if squared else kept
