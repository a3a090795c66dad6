"""8-bit integers in groups of 32 activations, against their rule written out, and how panels are laid out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from forerun.math.integer import integer_linear, rounded
from forerun.math.panels import GROUP, PANEL, QUAD, encode_panels, look_up, panel_format, panel_linear, panel_parts


def test_a_product_is_that_of_the_integers_group_by_group() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 96), torch.randn(5, 96), torch.randn(5)
    x[1, 7] = 50.0
    numbers, scale = rounded(weight)
    got = panel_linear(x, numbers, scale[:, 0], bias)
    for t in range(2):
        for n in range(5):
            total = np.float32(0)
            for g in range(3):
                some = x[t, g * GROUP : (g + 1) * GROUP]
                largest = np.float32(some.abs().max())
                steps = [round(float(np.float32(v) * (np.float32(127) / largest))) for v in some.numpy()]
                whole = sum(a * int(b) for a, b in zip(steps, numbers[n, g * GROUP :], strict=False))
                total = total + np.float32(whole) * (largest / np.float32(127))
            assert got[t, n].item() == total * np.float32(scale[n, 0]) + np.float32(bias[n])


def test_a_number_that_stands_far_out_spoils_its_own_group_alone() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 576), torch.randn(64, 576)
    x[0, 7] = 50.0
    numbers, scale = rounded(weight)
    exact = nn.functional.linear(x, scale * numbers)
    errors = [(made(x, numbers, scale[:, 0]) - exact).norm() for made in (panel_linear, integer_linear)]
    assert 0 < errors[0] < 0.5 * errors[1]  # one group of 18 has such errors: about a quarter


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_makes_nothing_but_nan(odd: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = odd
    numbers, scale = rounded(torch.randn(16, 64))
    out = panel_linear(x, numbers, scale[:, 0])
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_panels_hold_four_inputs_of_sixteen_outputs_side_by_side() -> None:
    torch.manual_seed(1)
    weight = torch.randn(3 * PANEL, 64)
    weight[5] = 0
    numbers, scale = rounded(weight)
    raw = encode_panels(weight)
    assert raw.dtype == torch.uint8 and raw.shape == (48, 68) and raw.is_contiguous()
    panel = raw.flatten()[PANEL * 68 : 2 * PANEL * 68]  # outputs 16 to 31
    assert torch.equal(panel[: 4 * PANEL].view(torch.float32), scale[16:32, 0])
    place = 4 * PANEL + 3 * PANEL * QUAD + 9 * QUAD  # inputs 12 to 15 of output 25
    assert torch.equal(panel[place : place + QUAD].view(torch.int8), numbers[25, 12:16])
    found, scales = panel_parts(raw)
    assert torch.equal(found, numbers) and torch.equal(scales, scale[:, 0])
    dense = panel_format(64).decode(raw.flatten()).view(weight.shape)
    assert torch.equal(dense, scale * numbers)
    assert torch.equal(encode_panels(dense), raw)  # what is on the grid stays there
    ids = torch.tensor([47, 0, 17, 17])
    assert torch.equal(look_up(raw, ids), dense[ids])
    with pytest.raises(IndexError):
        look_up(raw, torch.tensor([-1]))
