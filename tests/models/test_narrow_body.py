"""Fused layers with rounded weights against the modules that hold them, whose products are `math.scaled`'s."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

pytest.importorskip("triton")

from forerun import kernels
from forerun.config import Kernels
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.rounding import round_weights
from forerun.math import scaled
from forerun.math.scaled import SCHEMES
from forerun.models.bodies import cpu, gpu
from forerun.models.bodies.gpu import GpuBody
from forerun.models.scorer import Scorer
from support.census import Recipe, build
from support.described import NEW, TEXTS, expected, feed
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


@cache
def rounded(scheme: str, kind: str = "llama") -> PreTrainedModel:
    """Sizes that a group of four bits divides."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    model = build(Recipe(kind, KINDS[kind], sizes)).float().to(DEVICE)
    round_weights(model, scheme, DEVICE, "tiny")
    return model


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    a, b = (torch.cat([each.flatten() for each in logits]) for logits in (got, want))
    return float((a - b).norm() / b.norm())


@cache
def moved_by_lost_bits(kind: str) -> float:
    """How far logits of an fp8 model move when sums lose what tensor cores may lose of them, at most.

    Hopper keeps 14 bits of such sums; `test_scaled` holds a product to 2**-10 of a row's largest number. That moves
    some of the next rows' numbers to another of 255 codes, an eighth of them away, and no reference says which.
    """
    model, exact = rounded("fp8", kind), scaled.linear

    def disturbed(*arguments: Any) -> Tensor:
        made = exact(*arguments)
        noise = 2 * torch.rand(made.shape, generator=generator).to(made.device) - 1
        return made + 2.0**-10 * noise * made.abs().amax(-1, keepdim=True)

    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TRITON_DEVICES", frozenset())
        want = expected(copy.deepcopy(model))
        patch.setattr(scaled, "linear", disturbed)
        return max(distance(expected(copy.deepcopy(model)), want) for _ in range(4))


def check(got: list[Tensor], want: list[Tensor], scheme: str, kind: str = "llama") -> None:
    if scheme == "fp8" and DEVICE.type == "cuda":
        assert distance(got, want) < 2 * moved_by_lost_bits(kind)
    else:
        # A row that is rounded may fall to the other side of a half where its norm was summed in another order.
        assert error(got, want) < (2e-3 if SCHEMES[scheme].rounds_rows else 5e-5)


def scores(scorer: Scorer, alone: int = len(NEW[0])) -> list[Tensor]:
    """Of so many tokens alone: through the interpreter the next ones are as dear as the first."""
    feed(scorer)
    found = list(scorer.score([0, 1], NEW).split([len(new) for new in NEW]))
    scorer.rewind([0], [len(TEXTS[0])])
    return [*found, torch.cat([scorer.score([0], [[token]]) for token in NEW[0][:alone]])]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_layers_by_the_references(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch alone: the order of the steps and the merged weights, without the interpreter's patience."""
    model = copy.deepcopy(rounded(scheme))
    body = GpuBody(model)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", frozenset())
    want = expected(copy.deepcopy(rounded(scheme)))
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.body = body
    assert error(scores(scorer), [*want, want[0]]) < (2e-3 if SCHEMES[scheme].rounds_rows else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_layers(scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts, several new tokens of two rows, then one row alone."""
    model = copy.deepcopy(rounded(scheme, kind))
    monkeypatch.setattr(kernels, "TRITON_DEVICES", frozenset())
    want = expected(copy.deepcopy(model))  # by the references
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    scorer = Scorer(model, use=Kernels.ON)
    assert isinstance(scorer.body, GpuBody), gpu.why_not(model)
    assert isinstance(scorer.body.layers[0].qkv.weight, ScaledWeight)
    check(scores(scorer, alone=1), [*want, want[0][:1]], scheme, kind)


@pytest.mark.quick("fp8-qwen3", "int8-llama")
@pytest.mark.parametrize(("scheme", "kind"), [("int8", "llama"), *(("fp8", kind) for kind in KINDS)])
def test_control_scales_of_other_outputs_are_noticed(scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of eight takes its neighbours' scales."""
    model = copy.deepcopy(rounded(scheme, kind))
    body = GpuBody(model)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", frozenset())
    want = expected(copy.deepcopy(rounded(scheme, kind)))
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.body = body
    weight = body.layers[0].out.weight
    assert isinstance(weight, ScaledWeight)
    weight.scales[:] = weight.scales.roll(1, 0)
    got = scores(scorer)
    if scheme == "fp8":
        assert distance(got, [*want, want[0]]) > 2 * moved_by_lost_bits(kind)
    else:
        assert error(got, [*want, want[0]]) > 2e-3


def test_merged_weights_are_the_modules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    model = copy.deepcopy(rounded("int4"))
    body = GpuBody(model)
    qkv, attention = body.layers[0].qkv.weight, model.base_model.layers[0].self_attn
    assert isinstance(qkv, ScaledWeight)
    assert qkv.raw.data_ptr() == attention.q_proj.weight.raw.data_ptr()
    assert torch.equal(qkv.dense()[-len(attention.v_proj.weight) :], attention.v_proj.weight.dense())
    assert attention.k_proj.weight.scales.untyped_storage().data_ptr() == qkv.scales.untyped_storage().data_ptr()
    assert GpuBody(model).layers[0].qkv.weight.raw.data_ptr() == qkv.raw.data_ptr()  # type: ignore[attr-defined]


def test_what_is_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights rounded in different ways that should lie side by side; a CPU's fused layers take none at all."""
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    model = copy.deepcopy(rounded("int8"))
    attention = model.base_model.layers[1].self_attn
    attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight.dense(), requires_grad=False)
    assert "rounded in different ways" in str(gpu.why_not(model))
    if DEVICE.type == "cpu":
        assert "rounded for a GPU" in str(cpu.why_not(model))
