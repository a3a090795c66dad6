"""Norms of vectors: by the root of the mean square, or of what is left without the mean; what they are is data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.memory import Floats, pointer

NONE, ROOT_MEAN_SQUARE, CENTRED = range(3)  # kinds of norms
# Addresses of float32 tensors, 0 where there is no bias; `offset` is added to every gain.
NORM = np.dtype([("kind", "i8"), ("gain", "i8"), ("bias", "i8"), ("epsilon", "f4"), ("offset", "f4")], align=True)


@compiled()
def root_mean_square_norm(x: Floats, gain: int, epsilon: np.float32, offset: np.float32, out: Floats) -> None:
    weight = carray(pointer(gain), (x.shape[0],), np.float32)
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = (offset + weight[i]) * (x[i] * factor)


@compiled()
def centred_norm(x: Floats, gain: int, bias: int, epsilon: np.float32, offset: np.float32, out: Floats) -> None:
    """`gain` 0: the model has neither gain nor bias (OLMo)."""
    width = x.shape[0]
    mean = np.float32(0)
    for i in range(width):
        mean += x[i]
    mean /= np.float32(width)
    spread = np.float32(0)
    for i in range(width):
        spread += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1) / np.sqrt(spread / np.float32(width) + epsilon)
    for i in range(width):
        out[i] = (x[i] - mean) * factor
    if gain:
        weight = carray(pointer(gain), (width,), np.float32)
        for i in range(width):
            out[i] *= offset + weight[i]
    if bias:
        shift = carray(pointer(bias), (width,), np.float32)
        for i in range(width):
            out[i] += shift[i]


@njit(nogil=True, cache=True)
def norm(x: Floats, spec: Any, out: Floats, skip: int = 0) -> None:
    """One vector, normed as a `NORM` says; `out` may be `x`. Gains and biases begin `skip` numbers further on."""
    if spec.kind == ROOT_MEAN_SQUARE:
        root_mean_square_norm(x, spec.gain + skip * 4, spec.epsilon, spec.offset, out)
    elif spec.kind == CENTRED:
        bias = spec.bias + skip * 4 if spec.bias else 0
        centred_norm(x, spec.gain + skip * 4 if spec.gain else 0, bias, spec.epsilon, spec.offset, out)
    else:
        for i in range(x.size):  # see `memory.write_at`
            out[i] = x[i]


@njit(nogil=True, cache=True)
def norms(x: Floats, spec: Any, out: Floats) -> None:
    """Every row."""
    for n in range(x.shape[0]):
        norm(x[n], spec, out[n])
