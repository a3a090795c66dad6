"""Rounding of weights and rows, number by number."""

from __future__ import annotations

import pytest
import torch

from forerun.math import scaled
from forerun.math.scaled import FP8, INT4, INT8, SCHEMES, W8A8, Scheme

NORMAL = {(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
E4M3 = sorted({sign * x for sign in (-1, 1) for x in NORMAL | {m / 8 * 2.0**-6 for m in range(8)}})


def by_hand(value: float, scale: float, scheme: Scheme) -> float:
    """The number that is stored, in exact arithmetic of Python's floats, which hold all quotients well enough."""
    if scale == 0:
        return 0.0
    part = min(max(value / scale, scheme.bounds[0]), scheme.bounds[1])
    if scheme.values is not torch.float8_e4m3fn:
        return float(round(part))
    near = sorted(E4M3, key=lambda x: abs(x - part))[:2]
    if abs(near[0] - part) == abs(near[1] - part):  # halves go to the one whose last bit is 0
        return next(x for x in near if torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).item() % 2 == 0)
    return near[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_by_hand(name: str, dtype: torch.dtype) -> None:
    """Every number of a small weight: halves, zeros, a row of zeros, tiny and large ones, the largest itself."""
    scheme = SCHEMES[name].fitted(32)
    assert scheme is not None
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    weight[1] = 0
    weight[2] = torch.arange(32) / 2 - 8
    weight[3] *= 1e-30
    weight[4] *= 1e5
    weight[5, 1:] = 0
    weight = weight.to(dtype)
    values, scales = scaled.rounded_weight(weight, scheme, dtype)
    assert scales.dtype == dtype and scales.shape == (6, 1)
    numbers = scaled.whole_numbers(values, scheme)
    for i in range(6):
        scale = float(scales[i, 0])
        largest = float(weight[i].float().abs().max())
        assert scale == float((torch.tensor(largest) / scheme.largest).to(dtype))
        for j in range(32):
            quotient = float(weight[i, j].float() / scales[i, 0].float()) if scale else 0.0
            assert float(numbers[i, j]) == by_hand(quotient, 1.0 if scale else 0.0, scheme), (i, j)
    dense = scaled.dense(values, scales, scheme)
    step = scales.float() * (0.5 if scheme.values is not torch.float8_e4m3fn else 16)
    assert ((dense - weight.float()).abs() <= step * 1.04 + 1e-45).all()


def test_four_bits_are_packed_by_halves_of_a_group() -> None:
    numbers = torch.arange(128, dtype=torch.uint8).remainder(16).view(2, 64)
    raw = scaled.packed(numbers, 32)
    assert raw.shape == (2, 32) and torch.equal(scaled.unpacked(raw, 32), numbers)
    assert int(raw[0, 3]) == int(numbers[0, 3]) + 16 * int(numbers[0, 19])


def test_groups_of_four_bits() -> None:
    """A scale a group: one large number spoils no other group; sizes that no group divides have no scheme."""
    weight = torch.full((1, 256), 0.01)
    weight[0, 0] = 100.0
    assert INT4.fitted(256) == INT4 and INT4.fitted(96).group == 32 and INT4.fitted(65) is None  # type: ignore[union-attr]
    assert INT8.fitted(65) is INT8
    dense = scaled.dense(*scaled.rounded_weight(weight, INT4, torch.float32), INT4)
    assert (dense[0, 1:128] == 0).all() and torch.allclose(dense[0, 128:], weight[0, 128:], rtol=0.08)


@pytest.mark.parametrize("scheme", [W8A8, FP8], ids=["w8a8", "fp8"])
def test_rows_by_hand(scheme: Scheme) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40)
    x[1] = 0
    values, scales = scaled.rounded_rows(x, scheme)
    for i, j in [(i, j) for i in range(3) for j in range(40)]:
        quotient = float(x[i, j] / scales[i]) if scales[i] else 0.0
        assert float(values[i, j].float()) == by_hand(quotient, float(scales[i] > 0), scheme)
    assert float(values[0].float().abs().max()) == scheme.largest


@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_is_that_of_the_dense_weight(name: str) -> None:
    """Within float32 where rows stay as they are, within a hundredth where they are rounded, too; rows alone decide."""
    scheme = SCHEMES[name].fitted(64)
    assert scheme is not None
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 64), torch.randn(5, 64), torch.randn(5)
    values, scales = scaled.rounded_weight(weight, scheme, torch.float32)
    got = scaled.linear(x, values, scales, scheme, bias)
    want = x @ scaled.dense(values, scales, scheme).T + bias
    assert got.shape == (2, 3, 5)
    error = float((got - want).norm() / want.norm())
    assert error < (0.05 if scheme.rounds_rows else 1e-6)
    assert error > 1e-5 or not scheme.rounds_rows, "rows were not rounded"
    x[0] = torch.nan
    torch.testing.assert_close(scaled.linear(x, values, scales, scheme, bias)[1], got[1], rtol=0, atol=0)
