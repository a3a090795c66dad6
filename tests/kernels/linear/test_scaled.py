"""Products with rounded weights in Triton against `math.scaled`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import torch.nn.functional as F

from forerun.kernels.linear import many_rows
from forerun.kernels.linear import project as kernel
from forerun.kernels.linear.project import Plan
from forerun.kernels.linear.rounding import round_rows
from forerun.kernels.scaled import ScaledWeight
from forerun.math import scaled
from forerun.math import skinny as reference
from forerun.math.scaled import FP8, INT4, INT8, SCHEMES, W8A8, Scheme
from forerun.math.skinny import Heads, Norm
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

WIDTH, OUTPUTS = 160, 44
SMALL, CUT, ONE = Plan(16, 32, 4, 2, 1), Plan(16, 64, 4, 2, 3), Plan(4, 64, 4, 1)
NAMES = list(SCHEMES)


def weight_of(name: str, outputs: int = OUTPUTS, dtype: torch.dtype = torch.float32) -> ScaledWeight:
    torch.manual_seed(1)
    scheme = SCHEMES[name].fitted(WIDTH)
    assert scheme is not None
    weight = torch.randn(outputs, WIDTH).to(DEVICE, dtype)
    return ScaledWeight(*scaled.rounded_weight(weight, scheme, dtype), scheme)


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


def reference_of(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """In float32, from the same rounded numbers."""
    return scaled.linear(x.float(), weight.values, weight.scales, weight.scheme, bias)


def check(got: Tensor, want: Tensor) -> None:
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=4 * step, atol=8 * step * float(want.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "plan"), [(1, ONE), (1, SMALL), (3, SMALL), (3, CUT), (17, SMALL)])
def test_project(name: str, rows: int, plan: Plan) -> None:
    if name == "int4":
        plan = replace(plan, block_k=64)
    weight, x = weight_of(name), rows_of(rows)
    bias, residual = torch.randn(OUTPUTS, device=DEVICE), torch.randn(rows, OUTPUTS, device=DEVICE)
    got = kernel.project(x, weight, bias, None, residual, plan=plan)
    check(got, reference_of(x, weight, bias) + residual)
