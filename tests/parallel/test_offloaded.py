"""A model that accelerate spreads over places decodes as it does in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import forerun
from support.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3]]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_in_several_places(place: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = tiny_model("llama")
    whole.save_pretrained(tmp_path / "model")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": place,
                    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=tmp_path / "offload",
    )  # fmt: skip
    assert place == "cpu" or any(weight.is_meta for weight in spread.parameters())
    for keywords in ({}, {"temperature": 0.9, "seed": 2}):
        ours, theirs = (
            forerun.SpeculativeDecoder(model, "lookup", policy=3).generate(PROMPTS, max_new_tokens=8, **keywords)
            for model in (spread, whole)
        )
        assert ours.new_tokens == theirs.new_tokens
