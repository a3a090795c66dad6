"""Attention of one token by the compiled kernel against torch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from forerun.kernels.cpu.activation import gated
from forerun.kernels.cpu.attention import attend
from forerun.kernels.cpu.exponential import exponentials
from support import rounding


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, scale: float) -> torch.Tensor:
    """`q` [heads, D] against `k`, `v` [S, kv heads, D]."""
    heads, size = q.shape
    keys, kv_heads, _ = k.shape
    out, scores = torch.full_like(q, torch.nan), torch.empty(heads * keys)
    offset = head * size * 4
    attend(
        q.data_ptr(), k.data_ptr() + offset, v.data_ptr() + offset, out.data_ptr(), heads, size, kv_heads * size, keys,
        np.float32(scale), scores.data_ptr(),
    )  # fmt: skip
    return out


@pytest.mark.quick(every=5)  # every pair of two values still: of seven, six and six none is a multiple of five
@pytest.mark.parametrize("size", [8, 16, 24, 64, 80, 128])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5, 64, 131])
def test_agrees_with_float64(keys: int, heads: int, size: int) -> None:
    q, k, v = torch.randn(heads, size), torch.randn(keys, 2, size), torch.randn(keys, 2, size)
    scale = size**-0.5
    for head in range(2):
        shares = torch.softmax(q.double() @ k[:, head].double().T * scale, dim=-1)
        want = shares @ v[:, head].double()
        bound = rounding.of_attention(q, k, v, scale, keys)
        torch.testing.assert_close(_attend(q, k, v, head, scale).double(), want, rtol=0, atol=bound)


def test_scores_that_would_overflow() -> None:
    q, k, v = torch.full((1, 8), 50.0), torch.zeros(5, 1, 8), torch.randn(5, 1, 8)
    k[3] = 40.0
    torch.testing.assert_close(_attend(q, k, v, 0, 1.0)[0], v[3, 0])


def test_exponential_over_its_whole_range() -> None:
    """Three roundings of half an ulp: of the reduced argument, the polynomial and the last sum; fused or not."""
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    got = x.copy()
    exponentials(got)
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 3 * rounding.HALF_ULP
    far = np.array([-1e30, -200, 0, 1e30], dtype=np.float32)
    exponentials(far)
    assert far[0] < 2e-38 and far[1] < 2e-38 and far[2] == 1 and np.isfinite(far[3])


def test_gate() -> None:
    """Half ulps: three of the exponential, then a sum, a quotient, which may become a product with the reciprocal, and
    a product."""
    gate, up = torch.linspace(-80, 100, 999), torch.randn(999)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    gated(gate.numpy(), up.numpy())
    torch.testing.assert_close(gate.double(), want, rtol=7 * rounding.HALF_ULP, atol=0)
