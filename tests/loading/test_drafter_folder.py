"""Drafter folders: what is written comes back, and what is broken is named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.drafters import DraftModel, FeatureHead
from forerun.errors import ForerunError, InvalidArgument, ModelNotFound, UnsupportedModel
from forerun.loading.drafter_folder import (
    DRAFT_VOCABULARY,
    DrafterManifest,
    build,
    check_target,
    describe_target,
    is_drafter_folder,
    load_drafter,
    save_drafter,
)
from forerun.models.draft_head import DraftHead
from support.heads import head_of
from support.tiny import tiny_model

TARGET = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": 97}
MANIFEST = DrafterManifest("feature", 0, TARGET, ("embedding", "head"), {"steps": 10})
IDS = torch.tensor([1, 5, 96], dtype=torch.int32)


def parts() -> tuple[Any, dict[str, Tensor]]:
    head = head_of(tiny_model("llama"))
    return head.config, {**head.state_dict(), DRAFT_VOCABULARY: IDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "draft", MANIFEST, *parts())
    return tmp_path / "draft"


def test_what_is_written_comes_back(folder: Path) -> None:
    manifest, config, tensors = load_drafter(folder)
    assert manifest == MANIFEST
    assert config.num_hidden_layers == 2 and config.model_type == "llama"
    wanted = parts()[1]
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert sorted(os.listdir(folder)) == ["config.json", "forerun.json", "model.safetensors"]
    assert is_drafter_folder(folder) and not is_drafter_folder(folder.parent)
    assert os.listdir(folder.parent) == ["draft"], "nothing is left beside"
    assert json.loads((folder / "forerun.json").read_text())["format"] == 1


def test_the_body_is_the_same_after_a_round_trip(folder: Path) -> None:
    _, config, tensors = load_drafter(folder)
    tensors.pop(DRAFT_VOCABULARY)
    loaded, made = DraftHead(config).eval(), head_of(tiny_model("llama"))
    loaded.load_state_dict(tensors)
    pairs = torch.randn(1, 7, 32)
    a, b = (head.body(inputs_embeds=pairs).last_hidden_state for head in (loaded, made))
    assert torch.equal(a, b)


def test_saving_again_replaces_and_keeps_other_files(folder: Path) -> None:
    (folder / "train.jsonl").write_text("{}\n")
    config, tensors = parts()
    save_drafter(
        folder, replace(MANIFEST, provenance={"steps": 20}), config, {**tensors, "fuse.weight": torch.ones(32, 64)}
    )
    manifest, _, found = load_drafter(folder)
    assert manifest.provenance == {"steps": 20} and bool((found["fuse.weight"] == 1).all())
    assert (folder / "train.jsonl").is_file()


def test_a_save_that_fails_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the new weights are written."""

    def full(*call: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ForerunError, match="the disk is full"):
        save_drafter(folder, replace(MANIFEST, provenance={}), *parts())
    assert load_drafter(folder)[0] == MANIFEST
    assert os.listdir(folder.parent) == ["draft"]


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_drafter(tmp_path / "draft", MANIFEST, *parts())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "draft").iterdir()}
    assert modes == dict.fromkeys(("forerun.json", "config.json", "model.safetensors"), 0o640)
    assert (tmp_path / "draft").stat().st_mode & 0o777 == 0o750


def test_code_in_a_folder_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "odd.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    config = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="Python code of its own"):
        load_drafter(folder)
    assert not (folder / "ran").exists()


def test_an_interrupted_move_is_refused_not_mixed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the weights moved: old configuration and new weights must not pass for a drafter."""
    right, moved = os.replace, []

    def kill(source: Any, target: Any) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(right(source, target))

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(folder, MANIFEST, *parts())
    with pytest.raises(ModelNotFound, match=r"has no forerun\.json"):
        load_drafter(folder)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_broken_weights_are_not_saved(tmp_path: Path, value: float) -> None:
    config, tensors = parts()
    tensors["fuse.weight"] = tensors["fuse.weight"].clone()
    tensors["fuse.weight"][3, 4] = value
    with pytest.raises(InvalidArgument, match=r"fuse\.weight holds NaN or infinity"):
        save_drafter(tmp_path / "draft", MANIFEST, config, tensors)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("ids", ([], [3, 3], [5, 1], [-1, 2], [1, 97]), ids=str)
def test_odd_vocabularies_are_refused(tmp_path: Path, ids: list[int]) -> None:
    config, tensors = parts()
    with pytest.raises(InvalidArgument, match="ascending token ids below 97"):
        save_drafter(tmp_path / "d", MANIFEST, config, {**tensors, DRAFT_VOCABULARY: torch.tensor(ids)})


@pytest.mark.parametrize("name", ("forerun.json", "config.json", "model.safetensors"))
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelNotFound, match=name):
        load_drafter(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no drafter folder"):
        load_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize("size", (0, 5, 200, -10))
def test_truncated_weights_are_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InvalidArgument, match=r"model\.safetensors' is truncated or corrupt"):
        load_drafter(folder)


def test_a_bad_configuration_is_named(folder: Path) -> None:
    for text in ("{", "[]", '{"model_type": "nonesuch"}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"config\.json' is no model configuration"):
            load_drafter(folder)


def test_absurd_layer_counts_are_refused_before_anything_is_built(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(InvalidArgument, match="num_hidden_layers=1000000000"):
        load_drafter(folder)


def test_absurd_widths_are_refused_before_memory_is_taken(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**12}))
    manifest, odd, tensors = load_drafter(folder)
    made: list[str] = []

    def make() -> torch.nn.Module:
        made.append(str(torch.empty(0).device))
        return torch.nn.Linear(odd.intermediate_size, odd.hidden_size)

    with pytest.raises(UnsupportedModel, match=r"asks for [\d,]{15,} parameters"):
        build(folder, manifest, tensors, make)
    assert made == ["meta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, this version of Forerun reads 1"),
        ({"kind": "magic"}, "kind='magic'.*one of feature, parallel, causal"),
        ({"num_blocks": 2}, "num_blocks=2 with kind='feature'"),
        ({"kind": "parallel"}, "num_blocks=0 with kind='parallel'"),
        ({"shares": ["layers"]}, "only embedding, head, encoder can be shared"),
        ({"target": {"name": "x"}}, "target lacks hidden_size, model_type, vocab_size"),
        ({"target": None}, "forerun.json"),
        ({"kind": None}, "kind=None"),
    ],
    ids=str,
)
def test_odd_manifests_are_named(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "forerun.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidArgument, match=message):
        load_drafter(folder)


def test_manifests_that_lack_entries_or_are_no_json(folder: Path) -> None:
    path = folder / "forerun.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in whole.items() if name != "shares"}))
    with pytest.raises(InvalidArgument, match="lacks the entry 'shares'"):
        load_drafter(folder)
    for text, message in (("{", "not JSON"), ("[1]", "has format")):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=message):
            load_drafter(folder)


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    config, tensors = parts()
    for changed in ({**tensors, "fuse.weight": torch.ones(3, 3)}, {**tensors, "extra": torch.ones(1)}):
        save_drafter(folder, MANIFEST, config, changed)
        with pytest.raises(InvalidArgument, match=r"weights do not fit config\.json"):
            FeatureHead.load(folder)
    model = tiny_model("llama")
    manifest = DrafterManifest("causal", 0, describe_target(model))
    state = model.state_dict()
    norm = "model.norm.weight"
    for odd in (
        {k: v for k, v in state.items() if k != norm},
        {**state, "extra": torch.ones(1)},
        {**state, norm: torch.ones(5)},
    ):
        save_drafter(folder, manifest, model.config, odd)
        with pytest.raises(InvalidArgument, match=r"weights do not fit config\.json"):
            DraftModel.load(folder)._folder.beside(model)  # type: ignore[union-attr]


def test_a_sharing_draft_must_have_its_targets_width(tmp_path: Path) -> None:
    model = tiny_model("llama")
    other = tiny_model("llama", hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    manifest = DrafterManifest("causal", 0, describe_target(model), ("embedding", "head"))
    save_drafter(tmp_path / "d", manifest, other.config, other.state_dict())
    with pytest.raises(InvalidArgument, match="another width"):
        DraftModel.load(tmp_path / "d")._folder.beside(model)  # type: ignore[union-attr]


def test_targets_are_told_by_kind_and_sizes() -> None:
    model = tiny_model("llama")
    assert describe_target(model) == {**TARGET, "name": "LlamaForCausalLM"}
    check_target(TARGET, model)  # another name is no other target
    check_target({"hidden_size": 32}, model)
    for name, value in (("model_type", "mistral"), ("hidden_size", 64), ("vocab_size", 98)):
        with pytest.raises(InvalidArgument, match=f"made for tiny .*{name} {value}"):
            check_target({**TARGET, name: value}, model)
