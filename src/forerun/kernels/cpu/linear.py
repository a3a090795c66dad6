"""x @ weight.T (+ bias) for few rows of x: each weight is read once, whatever the number of rows."""

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor, nn

from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.product import multiply, product_address
from forerun.kernels.cpu.share import GRAIN, share
from forerun.kernels.cpu.threads import turn
from forerun.kernels.cpu.widen import FLOAT32, LANES

ROWS_AT_ONCE = 128  # inputs beyond this are taken in turns, so that they stay in a cache beside the weights


@njit(nogil=True, parallel=True, cache=True)
def _linear(product: int, w: int, x: int, out: int, tokens: int, count: int, size: int, num_threads: int) -> None:
    for part in prange(num_threads):
        first, last = share(count, part, num_threads, GRAIN)
        multiply(product, w, x, size, out, count, tokens, size, first, last)


def why_not(weight: Tensor) -> str | None:
    """Why the product cannot take this weight in place, in words; None where it can."""
    if type(weight) not in (Tensor, nn.Parameter):  # quantised and distributed ones say float32 and lie elsewhere
        return f"a weight of type {type(weight).__name__}"
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"a weight of {weight.dtype} on {weight.device.type}"
    if weight.layout is not torch.strided or weight.ndim != 2 or not weight.is_contiguous():
        return "a weight that is not a contiguous matrix"
    if weight.shape[1] % LANES or not weight.shape[1]:
        return f"a weight of {weight.shape[1]} inputs, not a multiple of {LANES}"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, num_threads: int) -> Tensor:
    """[.., K], [M, K] -> [.., M], float32."""
    return linear_at(x, (weight.data_ptr(), product_address(FLOAT32)), weight.shape[0], bias, num_threads)


def linear_at(x: Tensor, weight: tuple[int, int], count: int, bias: Tensor | None, num_threads: int) -> Tensor:
    """The same with a weight of `count` rows given by its address and that of the product for its format."""
    size = x.shape[-1]
    rows = x.reshape(-1, size).contiguous()
    out = torch.empty(rows.shape[0], count, dtype=torch.float32)
    address, product = weight
    with turn(num_threads):
        for first in range(0, rows.shape[0], ROWS_AT_ONCE):
            tokens = min(ROWS_AT_ONCE, rows.shape[0] - first)
            source, target = rows.data_ptr() + first * size * 4, out.data_ptr() + first * count * 4
            _linear(product, address, source, target, tokens, count, size, num_threads)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], count)
