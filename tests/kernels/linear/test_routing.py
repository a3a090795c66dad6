"""`kernels.linear.routing` against `math.routing`, and that against transformers' own routers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun.kernels.linear import routing as kernel
from forerun.math import routing as reference
from forerun.math.routing import Router, Scoring
from forerun.models.bodies.parts import read_router
from support.described import described_model
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

EXPERTS, WIDTH = 16, 24


def router(scoring: Scoring, **more: object) -> Router:
    torch.manual_seed(3)
    return replace(Router(torch.randn(EXPERTS, WIDTH, device=DEVICE), None, 3, scoring), **more)


def correction() -> Tensor:
    return torch.linspace(-0.4, 0.4, EXPERTS, device=DEVICE)


KINDS = {
    "softmax": lambda: router(Scoring.SOFTMAX, renormalised=True),
    "chosen": lambda: router(Scoring.CHOSEN, bias=torch.randn(EXPERTS, device=DEVICE)),
    "sigmoid in groups": lambda: router(
        Scoring.SIGMOID, renormalised=True, multiplier=2.5, correction=correction(), num_groups=4, top_groups=2,
        is_wide=True,
    ),
    "softmax in groups": lambda: router(
        Scoring.SOFTMAX, multiplier=16.0, num_groups=4, top_groups=2, is_wide=True, most=2
    ),
}  # fmt: skip


def table(shares: Tensor, chosen: Tensor) -> Tensor:
    """[N, E] what each expert counts, whatever the order in which they were chosen."""
    return torch.zeros(len(chosen), EXPERTS, device=DEVICE).scatter(1, chosen.long(), shares.float())


def told(found: kernel.Routed, rows: int) -> Tensor:
    """The same of sorted pairs."""
    ends, out = found.ends.tolist(), torch.zeros(rows, EXPERTS, device=DEVICE)
    assert ends[-1] == rows * found.most == len(set(found.pairs.tolist()))
    for expert in range(EXPERTS):
        for pair in found.pairs[ends[expert] : ends[expert + 1]].tolist():
            out[pair // found.most, expert] = found.shares[pair]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.quick("5-softmax", "5-sigmoid in groups")
def test_route(kind: str, rows: int) -> None:
    own, x = KINDS[kind](), torch.randn(rows, WIDTH, device=DEVICE)
    assert kernel.why_not(x, own) is None
    found, (shares, chosen) = kernel.route(x, own), reference.route(x, own)
    torch.testing.assert_close(told(found, rows), table(shares, chosen), rtol=1e-5, atol=1e-6)
    busy = chosen.unique().tolist()
    assert found.active.tolist()[: len(busy)] == busy and all(e < 0 for e in found.active.tolist()[len(busy) :])
    torch.testing.assert_close(told(kernel.sort_pairs(chosen, shares, EXPERTS), rows), table(shares, chosen))


def test_experts_that_score_alike() -> None:
    """A choice all the same, and no expert twice."""
    own = router(Scoring.SOFTMAX, weight=torch.zeros(EXPERTS, WIDTH, device=DEVICE))
    found = kernel.route(torch.randn(2, WIDTH, device=DEVICE), own)
    want = torch.zeros(2, EXPERTS, device=DEVICE)
    want[:, : own.most] = 1 / EXPERTS
    torch.testing.assert_close(told(found, 2), want)


@cache
def gate_of(family: str) -> torch.nn.Module:
    layer = described_model(family).base_model.layers[-1]
    block = getattr(layer, "mlp", None) or layer.block_sparse_moe
    gate: torch.nn.Module = block.gate if hasattr(block, "gate") else block.router
    return gate.to(DEVICE)


@pytest.mark.parametrize("family", [
    "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "glm4_moe", "deepseek_v2", "deepseek_v3", "axk1",
])  # fmt: skip
@torch.no_grad()
def test_the_reference_is_transformers(family: str) -> None:
    gate = gate_of(family)
    own, x = read_router(gate), torch.randn(9, gate.weight.shape[1], device=DEVICE)
    assert own is not None
    _, shares, chosen = gate(x)
    got, found = reference.route(x, own)
    sizes = 9, len(own.weight)
    made, want = (
        torch.zeros(sizes, device=DEVICE).scatter(1, i, s.float()) for i, s in ((found, got), (chosen, shares))
    )
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-6)
