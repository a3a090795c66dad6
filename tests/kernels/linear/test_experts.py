"""`kernels.linear.experts` against `math.experts`, and against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

pytest.importorskip("triton")

from forerun import kernels, ops
from forerun.kernels.linear import experts as kernel
from forerun.kernels.linear import routing
from forerun.kernels.linear.routing import Routed
from forerun.math import experts as reference
from forerun.math import routing as routing_reference
from forerun.math.experts import ExpertWeights
from forerun.math.routing import Router, Scoring
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


def surplus_reads(rows: int, monkeypatch: pytest.MonkeyPatch, change: Callable[[Routed], Routed]) -> list[list[int]]:
    """By product and expert: how often its weights are read beyond once, if chosen, by the launches' arguments."""
    found: list[list[int]] = []

    def count(name: str) -> None:
        launched = getattr(kernel, name)
        names = launched.arg_names

        class Counted:
            def __getitem__(self, grid: tuple[int, int]) -> Any:
                def launch(*args: Any, **more: Any) -> None:
                    given = dict(zip(names, args, strict=False)) | more
                    reads = [0] * EXPERTS
                    for expert in given["active_ptr"][: grid[0]].tolist():
                        if expert >= 0:
                            begin, end = given["ends_ptr"][expert : expert + 2].tolist()
                            reads[expert] += -(-(end - begin) // given["ROWS"])
                    found.append(reads)
                    launched[grid](*args, **more)

                return launch

        monkeypatch.setattr(kernel, name, Counted())

    for name in ("first_kernel", "second_kernel"):
        count(name)
    x, scores = torch.randn(rows, WIDTH, device=DEVICE), torch.randn(EXPERTS, WIDTH, device=DEVICE)
    pairs = routing.route(x, Router(scores, None, MOST, Scoring.SOFTMAX, True))
    kernel.run_experts(x, change(pairs), weights(Activation.SILU, False, False))
    chosen = (pairs.ends.diff() > 0).int().tolist()
    assert len(found) == 2 and sum(chosen) >= MOST
    return [[own - wanted for own, wanted in zip(reads, chosen, strict=True)] for reads in found]


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_chosen_experts_are_read_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert surplus_reads(rows, monkeypatch, lambda pairs: pairs) == [[0] * EXPERTS] * 2


def test_control_an_expert_that_is_read_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(pairs: Routed) -> Routed:
        return replace(pairs, active=torch.cat([pairs.active, pairs.active[:1]]))

    for extra in surplus_reads(8, monkeypatch, twice):
        assert sum(extra) == 1


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


@pytest.mark.parametrize("routed_by", ["kernel", "model", "before"])
def test_many_rows_without_a_library_are_taken_some_at_a_time(routed_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside a CUDA graph, where transformers' loop over experts cannot ask the host who was chosen."""
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    own = weights(Activation.SILU, False, False)
    router = Router(torch.randn(EXPERTS, WIDTH, device=DEVICE), None, MOST, Scoring.SOFTMAX, True)
    x = torch.randn(kernel.MOST_ROWS + 6, WIDTH, device=DEVICE)
    assert kernel.why_not(x, own) is not None
    route = partial(routing_reference.route, router=router)
    shares, chosen = route(x)
    asked = (lambda _: (shares, chosen)) if routed_by == "before" else route
    got = ops.run_experts(x, router if routed_by == "kernel" else None, asked, own, None)
    torch.testing.assert_close(got, reference.run_experts(x, chosen, shares, own), rtol=1e-4, atol=1e-3)
