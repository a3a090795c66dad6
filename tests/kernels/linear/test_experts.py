"""`kernels.linear.experts` against `math.experts`, and against transformers' own modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

pytest.importorskip("triton")

from forerun.kernels.linear import experts as kernel
from forerun.kernels.linear import routing
from forerun.math import experts as reference
from forerun.math.experts import ExpertWeights
from forerun.math.skinny import Activation
from forerun.models.bodies.merging import expert_weights
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

EXPERTS, WIDTH, INNER, MOST = 5, 48, 40, 2


def weights(activation: Activation | None, biased: bool, in_turns: bool) -> ExpertWeights:
    torch.manual_seed(0)
    shapes = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, 2 * INNER), (EXPERTS, WIDTH))
    first, second, *biases = (torch.randn(shape, device=DEVICE) for shape in shapes)
    return ExpertWeights(first, second, activation, *(biases if biased else (None, None)), in_turns=in_turns)


def routed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, two different experts for each, and what they count; one expert is chosen by nobody."""
    x, scores = torch.randn(rows, WIDTH, device=DEVICE), torch.rand(rows, EXPERTS - 1, device=DEVICE)
    shares, chosen = scores.topk(MOST)
    return x, chosen, shares


@pytest.mark.parametrize(("activation", "biased", "in_turns"), [
    (Activation.SILU, False, False), (None, True, True),
], ids=["gated", "gpt-oss"])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.quick("3-gated")
def test_run_experts(rows: int, activation: Activation | None, biased: bool, in_turns: bool) -> None:
    own = weights(activation, biased, in_turns)
    args = routed(rows)
    assert kernel.why_not(args[0], own) is None
    x, chosen, shares = args
    for is_distinct in (True, False):
        pairs = replace(routing.sort_pairs(chosen, shares, EXPERTS), is_distinct=is_distinct)
        got = kernel.run_experts(x, pairs, own)
        torch.testing.assert_close(got, reference.run_experts(*args, own), rtol=1e-4, atol=1e-3)


def test_a_row_that_chooses_an_expert_twice() -> None:
    """As where an identity was chosen, in whose place stands the first expert, and counts nothing."""
    own = weights(Activation.SILU, False, False)
    x, chosen, shares = routed(1)
    chosen, shares = torch.zeros_like(chosen), torch.tensor([[0.0, 0.7]], device=DEVICE)
    got = kernel.run_experts(x, routing.sort_pairs(chosen, shares, EXPERTS), own)
    torch.testing.assert_close(got, reference.run_experts(x, chosen, shares, own), rtol=1e-4, atol=1e-3)


def test_the_reference_is_transformers() -> None:
    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = MixtralExperts(config).to(DEVICE).requires_grad_(False)
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    x, chosen, shares = routed(7)
    got = reference.run_experts(x, chosen, shares, expert_weights(module, Activation.SILU))
    torch.testing.assert_close(got, module(x, chosen, shares), rtol=1e-4, atol=1e-3)


def test_what_is_left_to_others() -> None:
    own = weights(Activation.SILU, False, False)
    assert "rows" in str(kernel.why_not(torch.zeros(65, WIDTH, device=DEVICE), own))
    assert "another type" in str(kernel.why_not(torch.zeros(1, WIDTH, device=DEVICE).half(), own))
