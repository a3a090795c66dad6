"""A mixture of experts for a few rows; the reference is `math.experts`.

A chosen expert's weights are read once for all rows that chose it. Threads share the rows of its weights. The parts of
a row are added in the order of its experts, so its numbers do not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from forerun.kernels.cpu.activation import activate
from forerun.kernels.cpu.compiled import compiled
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.exponential import exponential
from forerun.kernels.cpu.memory import Floats, Ints, pointer
from forerun.kernels.cpu.product import multiply, product_address
from forerun.kernels.cpu.share import GRAIN, share
from forerun.kernels.cpu.widen import FLOAT32, LANES
from forerun.math.experts import SWIGLU_LIMIT, SWIGLU_SLOPE, ExpertWeights

CLAMPED = -1  # in the place of an activation
_LIMIT, _SLOPE = np.float32(SWIGLU_LIMIT), np.float32(SWIGLU_SLOPE)


def why_not(weights: ExpertWeights) -> str | None:
    """What the compiled form does not cover, in words; None where it covers everything."""
    for size in (weights.first.shape[2], weights.second.shape[2]):
        if size % LANES:
            return f"experts of size {size}, no multiple of {LANES}"
    return None


def run_experts(x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, num_threads: int) -> Tensor:
    """[N, H], chosen and shares [N, k] -> [N, H]: see `math.experts.run_experts`. Within a `threads.turn`."""
    experts, pairs = chosen.flatten().sort(stable=True)
    order = pairs.numpy()
    rows = order // chosen.shape[1]
    starts = np.flatnonzero(np.diff(experts.numpy(), prepend=-1))
    sorted_x = x.numpy()[rows]
    out, inner = torch.zeros(x.shape, dtype=torch.float32), weights.second.shape[2]
    work = np.empty((3, len(order), max(2 * inner, x.shape[1])), dtype=np.float32)
    activation = CLAMPED if weights.activation is None else int(weights.activation)
    biases = [0 if bias is None else bias.data_ptr() for bias in (weights.first_bias, weights.second_bias)]
    _run(
        sorted_x, np.append(starts, len(order)), experts.numpy()[starts], rows,
        shares.flatten().numpy()[order].astype(np.float32), weights.first.data_ptr(), weights.second.data_ptr(),
        *biases, product_address(FLOAT32), inner, activation, weights.in_turns, work, out.numpy(), num_threads,
    )  # fmt: skip
    return out


@compiled()
def _clamped(gate: Floats, up: Floats) -> None:
    for i in range(gate.shape[0]):
        g = min(gate[i], _LIMIT)
        u = max(min(up[i], _LIMIT), -_LIMIT) + np.float32(1)
        gate[i] = g / (np.float32(1) + exponential(-_SLOPE * g)) * u


@njit(nogil=True, parallel=True, cache=True)
def _run(
    x: Floats,  # [P, H] the row of every (row, expert) pair, sorted by expert
    starts: Ints,  # [G + 1] where the pairs of each chosen expert begin
    experts: Ints,  # [G]
    rows: Ints,  # [P] whose pair it is
    shares: Floats,  # [P]
    first: int,  # addresses of [E, 2 I, H], [E, H, I], and of biases or 0
    second: int,
    first_bias: int,
    second_bias: int,
    product: int,  # address of float32's (see `product`)
    inner: int,
    activation: int,
    in_turns: bool,
    work: Any,  # [3, P, at least 2 I and H]
    out: Floats,  # [N, H], zeros
    num_threads: int,
) -> None:
    hidden = x.shape[1]
    both, inner_states, parts = work[0], work[1], work[2]
    width = both.shape[1]
    for part in prange(num_threads):
        begin, end = share(inner, part, num_threads, GRAIN)
        for g in range(experts.shape[0]):
            a, b = starts[g], starts[g + 1]
            weight = first + experts[g] * 2 * inner * hidden * 4
            for side in range(2):
                low, high = (2 * begin, 2 * end) if in_turns else (side * inner + begin, side * inner + end)
                if not in_turns or side == 0:
                    multiply(
                        product, weight, x.ctypes.data + a * hidden * 4, hidden, both.ctypes.data + a * width * 4,
                        width, b - a, hidden, low, high,
                    )  # fmt: skip
            for n in range(a, b):
                if first_bias:
                    more = carray(pointer(first_bias + experts[g] * 2 * inner * 4), (2 * inner,), np.float32)
                    for i in range(begin, end):
                        low, high = (2 * i, 2 * i + 1) if in_turns else (i, inner + i)
                        both[n, low] += more[low]
                        both[n, high] += more[high]
                gate, up = inner_states[n, begin:end], parts[n, begin:end]
                for i in range(begin, end):
                    gate[i - begin] = both[n, 2 * i if in_turns else i]
                    up[i - begin] = both[n, 2 * i + 1 if in_turns else inner + i]
                if activation == CLAMPED:
                    _clamped(gate, up)
                else:
                    activate(gate, activation)
                    for i in range(gate.shape[0]):
                        gate[i] *= up[i]
    for part in prange(num_threads):
        begin, end = share(hidden, part, num_threads, GRAIN)
        for g in range(experts.shape[0]):
            a, b = starts[g], starts[g + 1]
            weight = second + experts[g] * hidden * inner * 4
            source, place = inner_states.ctypes.data + a * width * 4, both.ctypes.data + a * width * 4
            multiply(product, weight, source, width, place, width, b - a, inner, begin, end)
            for n in range(a, b):
                if second_bias:
                    more = carray(pointer(second_bias + experts[g] * hidden * 4), (hidden,), np.float32)
                    for i in range(begin, end):
                        both[n, i] += more[i]
                for i in range(begin, end):
                    out[rows[n], i] += shares[n] * both[n, i]
