"""Models by their Hub names: what is on this machine is read as a folder is."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

pytest.importorskip("numba")

from forerun.kernels.cpu import choice
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.scaled import ScaledWeight
from forerun.loading import STORED, load_model, save_rounded
from forerun.loading.hub import fetched_folder
from forerun.loading.load import LoadRequest
from forerun.loading.rounding import round_weights
from loading.gguf_writer import Typed, halved, llama_metadata, llama_tensors, tiny_llama, write_gguf
from support.folders import VOCAB, save
from support.tiny import tiny_model

NAME, COMMIT = "owner/name", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that libraries take for the repository's files at its branch "main"."""
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    place = repository / "snapshots" / COMMIT
    place.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return place


def saved(folder: Path) -> Path:
    model = copy.deepcopy(tiny_model("llama", vocab=VOCAB)).to(torch.bfloat16)
    model.generation_config.repetition_penalty = 1.25
    save(folder, model)
    return folder


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()


def loaded(name: str | Path, **options: Any) -> Any:
    return load_model(name, dtype=STORED, device="cpu", offline=True, **options).model


def values(model: Any) -> dict[str, torch.Tensor]:
    return {n: w.dense() if isinstance(w, NarrowWeight) else w for n, w in model.named_parameters()}


@pytest.mark.parametrize("has_shards", [False, True])
def test_halves_stay_as_those_of_a_folder_do(snapshot: Path, has_shards: bool) -> None:
    saved(snapshot)
    if has_shards:
        in_shards(snapshot)
    mine, theirs = loaded(NAME), loaded(snapshot)
    assert isinstance(mine.model.layers[0].mlp.up_proj.weight, NarrowWeight)
    assert mine.name_or_path == NAME and mine.generation_config.repetition_penalty == 1.25
    assert values(mine).keys() == values(theirs).keys()
    assert all(torch.equal(weight, values(theirs)[name]) for name, weight in values(mine).items())


def test_it_is_quantised_in_pieces(snapshot: Path) -> None:
    saved(snapshot)
    mine, theirs = loaded(NAME, quantize="int8"), loaded(snapshot, quantize="int8")
    assert mine.name_or_path == NAME and mine.generation_config.repetition_penalty == 1.25
    assert all(torch.equal(weight, values(theirs)[name]) for name, weight in values(mine).items())


def test_rounded_weights_are_read_as_they_are_stored(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama", vocab=VOCAB))
    save(snapshot, model)  # its tokenizer
    round_weights(model, "w8a8", torch.device("cpu"), "tiny")
    save_rounded(model, snapshot)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "compressed_tensors" else real(name, *more)
    )
    weight = loaded(NAME).model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, ScaledWeight) and torch.equal(weight.raw, model.model.layers[0].mlp.up_proj.weight.raw)


def test_what_is_not_whole_or_not_safetensors_is_no_folder(snapshot: Path) -> None:
    saved(snapshot)
    request = LoadRequest.of(NAME, STORED, "cpu", offline=True)
    config = request._config()
    assert fetched_folder(NAME, config, request.options) == snapshot
    in_shards(snapshot)
    assert fetched_folder(NAME, config, request.options) == snapshot
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert fetched_folder(NAME, config, request.options) is None
    (snapshot / "model.safetensors.index.json").unlink()
    assert fetched_folder(NAME, config, request.options) is None


def test_a_gguf_file(snapshot: Path) -> None:
    """Its blocks stay, and its rotary frequencies are read."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tiny = tiny_llama(tied=False)
    tensors = {name: halved(raw) if len(raw.shape) == 2 else raw for name, raw in llama_tensors(tiny).items()}
    write_gguf(snapshot / "tiny.gguf", llama_metadata(tiny) | {"llama.rope.scale_linear": Typed("f32", 2.0)}, tensors)
    model = loaded(f"{NAME}/tiny.gguf")
    assert model.config.rope_parameters["factor"] == 2
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, NarrowWeight)
