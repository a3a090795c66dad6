"""A model that accelerate spreads over places decodes as it does in one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forerun
from forerun.drafters import EarlyExit, FeatureHead, self_draft
from forerun.drafters.model_folder import cut_head
from forerun.errors import InvalidArgument, UnsupportedModel
from support.heads import head_of
from support.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3]]


def spread(folder: Path, place: str, embedding: str = "cpu", head: str = "cpu") -> Any:
    """The model of a folder with its second layer at `place`."""
    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(
        folder,
        device_map={"model.embed_tokens": embedding, "model.layers.0": "cpu", "model.layers.1": place,
                    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": head},
        offload_folder=folder / "offload",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_in_several_places(place: str, folder: Path) -> None:
    model = spread(folder, place)
    assert place == "cpu" or any(weight.is_meta for weight in model.parameters())
    for keywords in ({}, {"temperature": 0.9, "seed": 2}):
        ours, theirs = (
            forerun.SpeculativeDecoder(one, "lookup", policy=3).generate(PROMPTS, max_new_tokens=8, **keywords)
            for one in (model, tiny_model("llama"))
        )
        assert ours.new_tokens == theirs.new_tokens


def test_kept_keys_serve_later_calls(folder: Path) -> None:
    """Although accelerate puts other tensors into the modules after each pass."""
    prompt = [list(range(1, 60))]
    hits = []
    for model in (tiny_model("llama"), spread(folder, "disk")):
        decoder = forerun.SpeculativeDecoder(model, "lookup", policy=3, keep_rows=2)
        texts = [decoder.generate(prompt, max_new_tokens=4).new_tokens for _ in range(3)]
        assert texts[0] == texts[1] == texts[2]
        hits.append(decoder.engine.num_prefix_hits)
    assert hits[0] == hits[1] > 0


@pytest.mark.parametrize("how", ["written", "swapped"])
def test_kept_keys_of_other_weights_are_forgotten(how: str, folder: Path) -> None:
    """Weights are changed where accelerate fetches them from: in place, or by another map."""
    accelerate = pytest.importorskip("accelerate")
    prompt, model = [list(range(1, 60))], copy.deepcopy(tiny_model("llama"))
    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")
    decoder = forerun.SpeculativeDecoder(model, "lookup", policy=3, keep_rows=2)
    before = decoder.generate(prompt, max_new_tokens=8).new_tokens
    hook = model.model.layers[1].self_attn.v_proj._hf_hook
    if how == "written":
        hook.weights_map["weight"].mul_(-3)
    else:
        hook.weights_map = {"weight": hook.weights_map["weight"] * -3}
    after = decoder.generate(prompt, max_new_tokens=8).new_tokens
    assert after == forerun.SpeculativeDecoder(model, None).generate(prompt, max_new_tokens=8).new_tokens
    assert before != after and decoder.engine.num_prefix_hits == 0


def test_a_copy_of_offloaded_weights_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(folder, "disk")
    with pytest.raises(InvalidArgument, match=r"SelfDraft\(bits=8\): weights of the target are offloaded"):
        forerun.SpeculativeDecoder(model, forerun.SelfDraft(8))
    monkeypatch.setenv("FORERUN_KERNELS", "on")
    monkeypatch.setattr(self_draft, "why_not_numba", lambda: None)
    monkeypatch.setattr(self_draft, "SMALLEST", 0)
    monkeypatch.setattr(self_draft, "FREE_SHARE", 1e-9)
    monkeypatch.setattr(self_draft, "_promise", lambda stored: 2.0)
    assert self_draft.unasked(tiny_model("llama")) is not None
    assert self_draft.unasked(model) is None


def test_an_early_exit_of_a_model_with_hooks_is_refused(folder: Path) -> None:
    """accelerate's forward is bound to the whole target: a copy of fewer layers would run them all."""
    with pytest.raises(InvalidArgument, match="EarlyExit: LlamaForCausalLM has a forward of its own"):
        forerun.SpeculativeDecoder(spread(folder, "disk"), EarlyExit(1))


def test_an_early_exit_beside_offloaded_layers() -> None:
    """Hooks on the layers alone leave the path to them as it was."""
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny_model("llama"))
    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")
    ours, whole = (
        forerun.SpeculativeDecoder(one, EarlyExit(1), policy=3, strict=True).generate(PROMPTS, max_new_tokens=8)
        for one in (model, tiny_model("llama"))
    )
    assert ours.new_tokens == whole.new_tokens
    assert ours.stats.num_accepted_tokens == whole.stats.num_accepted_tokens < whole.stats.num_draft_tokens


def test_a_head_on_the_disk_is_no_drafter_s(tmp_path: Path) -> None:
    """Its weight is on the meta device: a product with it is whatever memory held, and no error."""
    whole = tiny_model("llama", tie_word_embeddings=False)
    whole.save_pretrained(tmp_path)
    model, drafter = spread(tmp_path, "cpu", head="disk"), FeatureHead(head_of(whole))
    with pytest.raises(InvalidArgument, match=r"the target's head, which is offloaded .* a device_map that keeps"):
        forerun.SpeculativeDecoder(model, drafter)
    with pytest.raises(InvalidArgument, match="the target's head, which is offloaded"):
        cut_head(model.lm_head, torch.tensor([1, 2]))
    ours, theirs = (
        forerun.SpeculativeDecoder(*pair, policy=3).generate(PROMPTS, max_new_tokens=8, temperature=0)
        for pair in ((model, "lookup"), (whole, drafter))
    )
    assert ours.new_tokens == theirs.new_tokens


def test_an_embedding_on_the_disk_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"model\.embed_tokens\.weight offloaded .* keeps model\.embed_tokens"):
        forerun.SpeculativeDecoder(spread(folder, "cpu", embedding="disk"), "lookup")
