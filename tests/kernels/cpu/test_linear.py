"""The few-row product against float64, at sizes that do not fit its tiles, and bit for bit against itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("numba")

from forerun.kernels.cpu.linear import linear, why_not
from forerun.kernels.cpu.product import BLOCK
from forerun.kernels.cpu.widen import LANES


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 4, 37, 130])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 32, 33, 70])
def test_agrees_with_float64(rows: int, count: int, threads: int) -> None:
    x, weight, bias = torch.randn(rows, 9 * LANES), torch.randn(count, 9 * LANES), torch.randn(count)
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x, weight, bias, threads).double(), want, rtol=0, atol=2e-5)


def test_several_blocks_of_rows_and_a_rest() -> None:
    size = 4096
    count = 2 * (BLOCK // (4 * size)) + 7
    x, weight = torch.randn(7, size), torch.randn(count, size)
    want = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight, None, 1).double(), want, rtol=0, atol=5e-4)


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    x, weight = torch.randn(40, 64), torch.randn(67, 64)
    together = linear(x, weight, None, 2)
    for i in range(40):
        assert torch.equal(linear(x[i : i + 1], weight, None, 1)[0], together[i])


def test_control_another_order_of_adding_has_other_bits() -> None:
    """Were rounding the same whatever the order, the test above would say little: it must notice halves added last."""
    torch.manual_seed(3)
    x, weight = torch.randn(40, 576), torch.randn(1536, 576)
    halves = linear(x[:, :288], weight[:, :288].contiguous(), None, 1) + linear(
        x[:, 288:], weight[:, 288:].contiguous(), None, 1
    )
    whole = linear(x, weight, None, 1)
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-4)
    assert not any(torch.equal(half, row) for half, row in zip(halves, whole, strict=True))


def test_shapes_of_any_rank_and_no_rows() -> None:
    x, weight = torch.randn(2, 3, 16), torch.randn(5, 16)
    torch.testing.assert_close(linear(x, weight, None, 2), x @ weight.T)
    assert linear(x[:, :0], weight, None, 2).shape == (2, 0, 5)


def test_an_input_that_is_a_view_is_read_right() -> None:
    x, weight = torch.randn(16, 8).T, torch.randn(5, 16)
    torch.testing.assert_close(linear(x, weight, None, 2), x @ weight.T)


def test_infinities_and_nan_pass_through() -> None:
    weight = torch.ones(5, 16)
    weight[1, 3], weight[2, 4] = torch.inf, torch.nan
    out = linear(torch.ones(1, 16), weight, None, 1)[0]
    assert out[1] == torch.inf and out[2].isnan() and out[0] == 16


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, LANES + 1),
        torch.zeros(4, LANES, dtype=torch.float64),
        torch.zeros(LANES, 4).T,
        torch.zeros(4, 2, LANES),
        torch.zeros(4, 0),
    ],
    ids=["odd width", "float64", "transposed", "three axes", "empty"],
)
def test_what_does_not_fit_is_known(weight: torch.Tensor) -> None:
    assert why_not(weight)
    assert why_not(torch.zeros(4, LANES)) is None


PROGRAM = """
import torch
torch.set_num_threads(1)
from forerun.kernels.cpu.linear import linear
before = torch.get_num_threads()
linear(torch.randn(1, 32), torch.randn(8, 32), None, 1)
print(before, torch.get_num_threads())
"""


@pytest.mark.slow
def test_torch_keeps_its_number_of_threads() -> None:
    """Numba's threads, once started, are four in this process: torch is asked for one and keeps to it."""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
