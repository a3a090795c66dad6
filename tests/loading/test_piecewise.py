"""Checkpoints that are quantised while they are read: the model that loading first gives, in far less memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("numba")

from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading import load_model, piecewise, quantise, tensor_files
from loading.wide_bytes import older_ones_unseen, wide_bytes
from support.folders import VOCAB, save
from support.tiny import tiny_model


def saved(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    model = tiny_model("llama", vocab=VOCAB, hidden_size=64, intermediate_size=128, **options).to(dtype)
    save(folder, model)
    return folder


def loaded_first(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> Any:
    """By transformers, whole, and quantised afterwards."""
    with monkeypatch.context() as patch:
        patch.setattr(piecewise.Piecewise, "of_folder", lambda *_: None)
        return load_model(folder, device="cpu", **options).model


def bytes_of(weight: Tensor) -> Tensor:
    return weight.raw if isinstance(weight, NarrowWeight) else weight


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
def test_it_is_the_model_that_is_loaded_first_and_quantised_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_tied: bool
) -> None:
    monkeypatch.setattr(quantise, "AT_ONCE", 300)  # less than a panel of rows: one panel at a time
    folder = saved(tmp_path, dtype, tie_word_embeddings=is_tied)
    for asked in ({"quantize": "int8"}, {"quantize": "w8a8", "quantize_head": False}):
        mine, theirs = load_model(folder, device="cpu", **asked).model, loaded_first(monkeypatch, folder, **asked)
        assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == is_tied
        pairs = list(zip(mine.named_parameters(), theirs.named_parameters(), strict=True))
        assert sum(isinstance(weight, NarrowWeight) for weight in mine.parameters()) >= 14
        for (name, a), (other, b) in pairs:
            assert name == other and type(a) is type(b) and torch.equal(bytes_of(a), bytes_of(b)), name
        assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(mine(ids).logits, theirs(ids).logits)


def test_sharded_files_and_files_that_are_not_the_models(tmp_path: Path) -> None:
    whole, parts = saved(tmp_path / "whole"), tmp_path / "parts"
    model = load_model(whole, device="cpu").model
    model.save_pretrained(parts, max_shard_size="60KB")
    for file in whole.glob("tokenizer*"):
        (parts / file.name).write_bytes(file.read_bytes())
    others = {name: torch.zeros_like(tensor) for name, tensor in load_file(whole / "model.safetensors").items()}
    save_file(others, parts / "consolidated.safetensors")  # transformers does not read it
    assert len(json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]) > 10
    one, other = (load_model(folder, device="cpu", quantize="int8").model for folder in (whole, parts))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(bytes_of(a), bytes_of(b))


def test_generation_settings_of_the_folder_are_kept(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    place = folder / "generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eos_token_id": [3, 5]}))
    assert load_model(folder, device="cpu", quantize="int8").model.generation_config.eos_token_id == [3, 5]


class TensorPeak:
    """The most bytes of wide numbers in tensors that anything held while some rows were rounded."""

    def __init__(self, patch: pytest.MonkeyPatch, scheme: str) -> None:
        self.most, self.calls = 0, 0
        format_for, encode = quantise._ENCODERS[scheme]
        patch.setitem(quantise._ENCODERS, scheme, (format_for, self._noting(encode)))

    def _noting(self, encode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def noted(values: Tensor) -> Tensor:
            self.calls += 1
            self.most = max(self.most, wide_bytes())
            return encode(values)

        return noted


def test_no_more_than_some_rows_are_wide_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: loaded first, all matrices are wide when the first is rounded."""
    monkeypatch.setattr(quantise, "AT_ONCE", 8192)
    folder = saved(tmp_path, num_hidden_layers=2)
    small = 32 << 10  # norms, buffers, a copy of the rows at hand
    peak = TensorPeak(monkeypatch, "int8")
    with older_ones_unseen():
        model = load_model(folder, device="cpu", quantize="int8").model
    wide = 4 * sum(w.numel() for w in model.parameters() if isinstance(w, NarrowWeight))
    layer = 4 * sum(w.numel() for w in model.model.layers[0].parameters())
    assert peak.calls > 2 * 7 and wide > 2 * layer
    assert 0 < peak.most <= 4 * 8192 + small < layer
    control = TensorPeak(monkeypatch, "int8")
    with older_ones_unseen():
        loaded_first(monkeypatch, folder, quantize="int8")
    assert control.most > 0.9 * wide


def same(mine: Any, theirs: Any) -> bool:
    pairs = list(zip(mine.named_parameters(), theirs.named_parameters(), strict=True))
    return all(a == b and torch.equal(bytes_of(x), bytes_of(y)) for (a, x), (b, y) in pairs)


def test_an_embedding_of_its_own_kind_and_a_folder_without_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices that are not read from a file in pieces are quantised from what was loaded."""
    gemma, bare = tmp_path / "gemma", saved(tmp_path / "bare")
    save(gemma, tiny_model("gemma2", vocab=VOCAB, hidden_size=64, intermediate_size=128))
    tensors = load_file(bare / "model.safetensors")
    without = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(without, bare / "model.safetensors", metadata={"format": "pt"})
    for folder in (gemma, bare):
        mine = load_model(folder, device="cpu", quantize="int8").model
        assert same(mine, loaded_first(monkeypatch, folder, quantize="int8"))
        assert mine.config.name_or_path == str(folder)


def test_two_matrices_that_should_be_one_and_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does it: what the file holds goes before what the configuration says."""
    folder = saved(tmp_path, tie_word_embeddings=False)
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"tie_word_embeddings": True}))
    mine = load_model(folder, device="cpu", quantize="int8").model
    assert mine.lm_head.weight is not mine.model.embed_tokens.weight
    assert same(mine, loaded_first(monkeypatch, folder, quantize="int8"))


def test_an_adapter_beside_the_weights_is_not_lost(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / tensor_files.ADAPTER).write_text("{}")
    sketch = tiny_model("llama", vocab=VOCAB, hidden_size=64, intermediate_size=128)
    assert piecewise.Piecewise.of_folder(folder, sketch, torch.float32) is None
    (folder / tensor_files.ADAPTER).unlink()
    assert piecewise.Piecewise.of_folder(folder, sketch, torch.float32) is not None
