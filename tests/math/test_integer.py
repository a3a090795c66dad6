"""8-bit integers against their rule written out value by value, and at their edges."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.math.integer import NEGLIGIBLE, encode_rows, integer_linear, parts, rounded, row_format

SIZE = 32


def rows() -> Tensor:
    """Ordinary rows; halves between two steps; zeros; one value; all alike; large, tiny, negligible."""
    torch.manual_seed(0)
    halves = torch.arange(SIZE) - 15.5
    halves[-1] = 127.0
    single = torch.zeros(SIZE)
    single[5] = -3.25
    edges = [halves, torch.zeros(SIZE), single, torch.full((SIZE,), -0.7), torch.full((SIZE,), NEGLIGIBLE / 2)]
    return torch.stack([*torch.randn(40, SIZE), *edges, torch.randn(SIZE) * 1e30, torch.randn(SIZE) * 1e-25])


def by_rule(row: Tensor) -> list[int]:
    """The nearest whole number of steps, ties to even: Python's own rounding of the exact value."""
    largest = np.float32(row.abs().max())
    inverse = np.float32(127) / largest if largest >= NEGLIGIBLE else np.float32(0)
    return [round(Fraction(float(np.float32(value) * inverse))) for value in row.numpy()]


def test_rounding_follows_the_rule() -> None:
    values = rows()
    numbers, scales = rounded(values)
    assert numbers.dtype == torch.int8 and scales.shape == (len(values), 1)
    for row, mine in zip(values, numbers.tolist(), strict=True):
        assert mine == by_rule(row)
    assert numbers.abs().amax() == 127 and numbers[40, :4].tolist() == [-16, -14, -14, -12]  # ties to even
    assert not numbers[41].any() and scales[41] == 0 and not numbers[44].any()
    assert torch.equal(scales[:40, 0], values[:40].abs().amax(1) / 127)


def test_steps_are_divided_by_the_largest_number() -> None:
    """By one division: a rounded reciprocal times 127 moves some numbers that lie near a half to the other side."""
    values = torch.randn(60_000, 96, generator=torch.Generator().manual_seed(0))
    numbers, largest = rounded(values)[0], values.abs().amax(1, keepdim=True)
    want = np.rint(values.numpy() * (np.float32(127) / largest.numpy()))
    assert np.array_equal(numbers.numpy(), want)
    assert not np.array_equal((values * (127 / largest)).round().numpy(), want)  # torch's short form


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_makes_nothing_but_nan(odd: float) -> None:
    x = torch.randn(3, SIZE)
    x[1, 7] = odd
    numbers, scales = parts(encode_rows(torch.randn(5, SIZE)))
    out = integer_linear(x, numbers, scales)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_a_product_is_that_of_the_integers() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(3, 2, 96), torch.randn(7, 96), torch.randn(7)
    numbers, scales = parts(encode_rows(weight))
    got = integer_linear(x, numbers, scales, bias)
    steps, scale = rounded(x)
    for place in np.ndindex(3, 2):
        for n in range(7):
            whole = sum(int(a) * int(b) for a, b in zip(steps[place], numbers[n], strict=True))
            want = np.float32(whole) * (np.float32(scale[place]) * np.float32(scales[n])) + np.float32(bias[n])
            assert got[place][n].item() == want
    error = (got - torch.nn.functional.linear(x, weight, bias)).abs()
    most = 96 * (x.abs().amax(-1, keepdim=True) * weight.abs().amax(1)) / 127  # half a step of either, each time
    assert error.max() > 0 and (error < most).all()


def test_rows_are_stored_with_their_scale() -> None:
    weight = rows()[:44]
    raw = encode_rows(weight)
    form = row_format(SIZE)
    assert raw.dtype == torch.uint8 and raw.shape == (44, form.size) and form.values == SIZE
    dense = form.decode(raw.flatten()).view(weight.shape)
    assert ((dense - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    assert torch.equal(encode_rows(dense), raw)  # what is on the grid stays there
