"""A pass that is run before it is recorded: fewer layers, and every launch that the whole of it has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

pytest.importorskip("triton")

from forerun import kernels, ops
from forerun.config import Kernels
from forerun.kernels.scaled import ScaledWeight
from forerun.math.scaled import INT8, rounded_weight
from forerun.models.bodies.gpu import GpuBody
from forerun.models.bodies.rehearsal import is_rehearsal, kind_of, layers_of_each_kind, rehearsal
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass
from support.described import NEW, TEXTS, described_model, feed
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()
LAYERS = 7


@dataclass(frozen=True)
class Described:
    weight: Any
    window: int = 0


def test_the_first_of_a_kind_behind_each_other_kind_and_the_last() -> None:
    a, b = Described(torch.zeros(4, 4)), Described(torch.ones(4, 4), window=8)
    assert layers_of_each_kind([a, replace(a, weight=torch.ones(4, 4)), a, a, a]) == {0, 1, 4}
    assert layers_of_each_kind([a, b, a, b, a, b, b, b, a]) == {0, 1, 2, 6, 8}
    assert layers_of_each_kind([a]) == {0}


def test_what_kernels_could_tell_apart_are_two_kinds() -> None:
    weight, norm = torch.zeros(8, 8), nn.LayerNorm(8)
    assert kind_of(weight) == kind_of(torch.ones(8, 8)) and kind_of(norm) == kind_of(copy.deepcopy(norm))
    assert kind_of(norm.extra_repr) == kind_of(copy.deepcopy(norm).extra_repr)
    others = [weight.half(), weight.T, weight[:4], torch.zeros(65)[1:].view(8, 8), nn.LayerNorm(8, eps=1.0), object()]
    assert len({kind_of(other) for other in (weight, norm, *others)}) == 8
    small, wide = (ScaledWeight(*rounded_weight(torch.randn(n, 64), INT8, torch.float32), INT8) for n in (8, 16))
    assert kind_of(small) != kind_of(wide) and kind_of(small) == kind_of(copy.deepcopy(small))


def deep(family: str) -> PreTrainedModel:
    """With more layers than kinds of them."""
    shallow = described_model(family)
    config = copy.deepcopy(shallow.config)
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * LAYERS)[:LAYERS]
    torch.manual_seed(0)
    return type(shallow)(config).eval().requires_grad_(False).to(DEVICE)


def passes(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> partial[Tensor]:
    """A pass of fixed shape by `GpuBody`, which runs torch alone."""
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    body = GpuBody(model)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", frozenset())
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.body = body
    feed(scorer)
    scorer.cache.reserve([0, 1], [16, 16])
    slots = torch.tensor([scorer.cache.slot(row) for row in (0, 1)], device=DEVICE)
    a_pass, past = StaticPass(scorer), torch.tensor([len(text) for text in TEXTS], device=DEVICE)
    rows = a_pass.rows(slots, past, 3, 16)
    return partial(a_pass.logits, torch.tensor([NEW[0], [*NEW[1], 5, 5]], device=DEVICE), rows)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of `ops`, and what kernels could know of them."""
    seen: list[Any] = []

    def watched(name: str, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            seen.append((name, kind_of(args), kind_of(sorted(options.items()))))
            return function(*args, **options)

        return call

    for name, function in vars(ops).copy().items():
        if isinstance(function, FunctionType) and not name.startswith("_") and function.__module__ == ops.__name__:
            monkeypatch.setattr(ops, name, watched(name, function))
    yield seen


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "qwen3_moe", "deepseek_v3"])
@torch.inference_mode()
def test_every_launch_is_rehearsed(family: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = passes(deep(family), monkeypatch)
    found: list[list[Any]] = []
    for context in (nullcontext(), rehearsal()):
        launches.clear()
        with context:
            run()
        found.append(launches.copy())
    whole, rehearsed = found
    assert set(whole) == set(rehearsed) and len(rehearsed) < len(whole) and not is_rehearsal()


@torch.inference_mode()
def test_a_rehearsal_says_nothing_and_the_pass_behind_it_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    run = passes(deep("llama"), monkeypatch)
    want = run().clone()
    with rehearsal():
        assert not torch.equal(run(), want)
    assert torch.equal(run(), want)
