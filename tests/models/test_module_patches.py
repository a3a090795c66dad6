"""Modules said in fewer launches say what transformers' own do, and are transformers' own again after a pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forerun.config import Kernels
from forerun.models.patches import modules as module_patches
from forerun.models.patches.modules import ModulePatches
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.static_pass import StaticPass
from support.seq2seq import rows_of, source_of
from support.tiny import tiny_model

FAMILIES = ("whisper", "t5", "t5_gated", "bart")


def logits(family: str, tokens: list[list[int]]) -> Tensor:
    """Of a recorded pass over two rows that read different sources, behind one and three tokens."""
    scorer = Seq2SeqScorer(tiny_model(family), use=Kernels.OFF)
    for row, source in enumerate(rows_of(family)[:2]):
        scorer.admit(row)
        scorer.read(row, source_of(source))
    scorer.feed([0, 1], [[2], [2, 7, 8]])
    scorer.cache.reserve([0, 1], [16, 16])
    scorer.lay_out()
    a_pass = StaticPass(scorer)
    rows = a_pass.rows(torch.tensor([0, 1]), torch.tensor([1, 3]), len(tokens[0]), 16)
    with torch.inference_mode():
        return a_pass.logits(torch.tensor(tokens), rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [[5, 6, 7], [9, 3, 4]]
    got = logits(family, tokens)
    monkeypatch.setattr(module_patches, "PATCHES", {})
    torch.testing.assert_close(got, logits(family, tokens), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in module_patches.PATCHES if kind.__name__ != "MT5LayerNorm"])
def test_control_every_kind_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "whisper" if kind.startswith("Whisper") else "t5_gated"
    want = logits(family, [[5], [9]])
    right = next(known for known in module_patches.PATCHES if known.__name__ == kind)

    def doubled(module: Any, *given: Any, **named: Any) -> Any:
        made = lean_forward(module, *given, **named)
        return (2 * made[0], *made[1:]) if isinstance(made, tuple) else 2 * made

    lean_forward = module_patches.PATCHES[right]
    monkeypatch.setitem(module_patches.PATCHES, right, doubled)
    assert not torch.allclose(logits(family, [[5], [9]]), want, rtol=1e-2)


def test_the_model_is_as_it_was() -> None:
    class Own(nn.Linear):
        pass

    body = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.Linear(3, 3))
    wrapped = body[2]
    wrapped.forward = lambda x: x  # type: ignore[method-assign]
    modules = ModulePatches(body)
    with pytest.raises(RuntimeError, match="in the middle"), modules.during_pass():
        assert "forward" in body[0].__dict__ and "forward" not in body[1].__dict__
        raise RuntimeError("in the middle")
    assert "forward" not in body[0].__dict__ and "forward" in wrapped.__dict__


def test_a_norm_that_somebody_watches_is_called() -> None:
    model = copy.deepcopy(tiny_model("whisper"))
    layer = model.model.decoder.layers[0]
    plain = len(ModulePatches(model.model.decoder)._patched)
    layer.final_layer_norm.register_forward_hook(lambda *given: None)
    assert len(ModulePatches(model.model.decoder)._patched) == plain - 1
