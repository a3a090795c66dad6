"""Our product inside models that are not fused: the same numbers, and nothing left behind in the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from support.recompute import check, recomputed
from support.tiny import tiny_model

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.kernels.cpu import choice
from forerun.models.bodies import choose
from forerun.models.patches import linear as linear_patches
from forerun.models.scorer import Scorer


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "gemma3", "phi3", "codegen", "bloom", "gpt2"])
def test_agrees_with_the_library(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = copy.deepcopy(tiny_model(family)), []
    choose.refuse(model)
    real = linear_patches.ops.linear
    monkeypatch.setattr(linear_patches.ops, "linear", lambda *a: used.append(1) or real(*a))
    scorer = Scorer(model, use=Kernels.ON)
    assert not scorer.is_fused
    for row in (0, 1):
        scorer.admit(row)
    texts = [[5, 9, 3, 60, 2, 7], [1, 2, 3]]
    got = scorer.score([0, 1], texts)
    check(got[:6], recomputed(model, texts[0]))
    check(got[6:], recomputed(model, texts[1]))
    assert used or family == "gpt2"  # whose layers are no nn.Linear, but for the head
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_pass_that_fails_leaves_the_layers_as_they_were() -> None:
    model = tiny_model("opt")
    with pytest.raises(RuntimeError), linear_patches.LinearPatches(model, Kernels.ON).during_pass(1):
        assert any("forward" in module.__dict__ for module in model.modules())
        raise RuntimeError
    assert not any("forward" in module.__dict__ for module in model.modules())


def _touched(model: Any, rows: int, use: Kernels) -> set[nn.Module]:
    with linear_patches.LinearPatches(model, use).during_pass(rows):
        return {module for module in model.modules() if "forward" in module.__dict__}


def test_what_somebody_has_wrapped_is_left_alone() -> None:
    class Wrapped(nn.Linear):
        pass

    model = copy.deepcopy(tiny_model("opt"))
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    layers[0].__dict__["forward"] = layers[0].forward
    layers[1].__class__ = Wrapped
    touched = _touched(model, 1, Kernels.ON)
    assert layers[2] in touched and layers[1] not in touched
    del layers[0].__dict__["forward"]


def test_many_rows_and_switched_off() -> None:
    model = tiny_model("opt")
    assert _touched(model, linear_patches.MOST_ROWS, Kernels.ON)
    assert not _touched(model, linear_patches.MOST_ROWS + 1, Kernels.ON)
    assert not _touched(model, 1, Kernels.OFF)


def test_auto_asks_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("opt")
    shapes = {tuple(module.weight.shape) for module in model.modules() if type(module) is nn.Linear}
    square = next(shape for shape in shapes if shape[0] == shape[1])
    monkeypatch.setattr(choice, "is_faster", lambda weight, rows: tuple(weight.shape) == square and rows <= 4)
    assert {tuple(module.weight.shape) for module in _touched(model, 3, Kernels.AUTO)} == {square}
    assert not _touched(model, 5, Kernels.AUTO)


def test_training_still_has_gradients() -> None:
    layer = nn.Linear(16, 8)
    out = linear_patches._forward(layer, Kernels.ON, torch.randn(2, 16))
    assert out.requires_grad
