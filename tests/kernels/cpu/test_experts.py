"""`kernels.cpu.experts` against `math.experts`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from forerun.kernels.cpu import experts as kernel
from forerun.kernels.cpu.threads import turn
from forerun.math import experts as reference
from forerun.math.experts import ExpertWeights
from forerun.math.skinny import Activation

EXPERTS, WIDTH, INNER = 5, 48, 40


@pytest.mark.parametrize(("activation", "biased", "in_turns"), [
    (Activation.SILU, False, False), (Activation.GELU_TANH, True, False), (None, True, True),
], ids=["silu", "gelu", "gpt-oss"])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_run_experts(activation: Activation | None, biased: bool, in_turns: bool, threads: int) -> None:
    """Several rows of one expert, and experts that nobody chose; a row's bits are its own in any batch."""
    torch.manual_seed(1)
    shapes = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, 2 * INNER), (EXPERTS, WIDTH))
    first, second, *biases = (torch.randn(shape) for shape in shapes)
    own = ExpertWeights(first, second, activation, *(biases if biased else (None, None)), in_turns=in_turns)
    x, (shares, chosen) = torch.randn(9, WIDTH), torch.rand(9, EXPERTS - 1).topk(2)
    with turn(threads):
        got = kernel.run_experts(x, chosen, shares, own, threads)
        alone = kernel.run_experts(x[4:5], chosen[4:5], shares[4:5], own, threads)
    torch.testing.assert_close(got, reference.run_experts(x, chosen, shares, own), rtol=1e-4, atol=1e-4)
    assert torch.equal(got[4:5], alone)
