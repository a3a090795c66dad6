"""Rounded models on disk, in compressed-tensors' format."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from forerun.errors import ForerunError, InvalidArgument, UnsupportedModel
from forerun.kernels.scaled import ScaledWeight
from forerun.loading import compressed, load_model, load_tokenizer, save_rounded
from forerun.loading.load import LoadRequest
from forerun.loading.rounding import round_weights
from forerun.math import scaled
from forerun.math.scaled import SCHEMES
from support.folders import VOCAB, save
from support.tiny import tiny_model

FORMATS = {"int8": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


def rounded(scheme: str, with_head: bool = False, **config: Any) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama", intermediate_size=64, **config))
    round_weights(model, scheme, torch.device("cpu"), "tiny", with_head)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(torch.tensor([[3, 5, 9, 2]])).logits
    return made


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    request = LoadRequest.of(folder, torch.float32, "cpu", **options)
    model: PreTrainedModel = request.model("a causal model", lambda config: AutoModelForCausalLM)
    return model


@pytest.fixture(autouse=True)
def _without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU transformers reads these folders with it, where it is installed."""
    real = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "compressed_tensors" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(scheme: str, tmp_path: Path) -> None:
    """The same bytes, the same scales, the same logits; embeddings and norms as they were."""
    model = rounded(scheme)
    save_rounded(model, tmp_path)
    says = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (says["quant_method"], says["format"], says["ignore"]) == (
        "compressed-tensors",
        FORMATS[scheme],
        ["lm_head"],
    )
    again = loaded(tmp_path)
    assert not hasattr(again.config, "quantization_config")
    for name, weight in model.named_parameters():
        other = dict(again.named_parameters())[name]
        if isinstance(weight, ScaledWeight):
            assert isinstance(other, ScaledWeight) and other.scheme == weight.scheme
            assert torch.equal(other.raw.view(torch.uint8), weight.raw.view(torch.uint8))
            assert torch.equal(other.scales, weight.scales)
        else:
            assert torch.equal(other, weight)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_rounded_head_there_and_back(is_tied: bool, tmp_path: Path) -> None:
    model = rounded("w8a8", with_head=True, tie_word_embeddings=is_tied)
    save_rounded(model, tmp_path)
    says = json.loads((tmp_path / "config.json").read_text())
    assert says["quantization_config"]["ignore"] == [] and not says["tie_word_embeddings"]
    again = loaded(tmp_path)
    assert isinstance(again.lm_head.weight, ScaledWeight) and torch.equal(logits(again), logits(model))
    without = logits(rounded("w8a8", tie_word_embeddings=is_tied))
    assert not torch.equal(without, logits(model))


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 8), ("int4", 4)])
def test_numbers_are_packed_from_the_lowest_bits_on(scheme: str, bits: int, tmp_path: Path) -> None:
    """By hand: number i of a row lies in word i * bits // 32, 2 ** (bits - 1) added."""
    model = rounded(scheme)
    save_rounded(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    weight = model.get_submodule(name).weight
    assert isinstance(weight, ScaledWeight)
    numbers = scaled.whole_numbers(weight.raw, weight.scheme)
    words = stored[f"{name}.weight_packed"]
    assert words.dtype == torch.int32 and stored[f"{name}.weight_shape"].tolist() == list(weight.shape)
    for row, column in ((0, 0), (3, 1), (5, 33), (31, 63)):
        word, shift = divmod(column * bits, 32)
        found = (int(words[row, word]) >> shift) % (1 << bits)
        assert found == int(numbers[row, column]) + (1 << bits - 1)


def test_scales_wider_than_the_model_stay_so(tmp_path: Path) -> None:
    save_rounded(rounded("fp8"), tmp_path)
    model = LoadRequest.of(tmp_path, torch.bfloat16, "cpu").model("a causal model", lambda config: AutoModelForCausalLM)
    weight = model.base_model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16 and weight.scales.dtype == torch.float32


@pytest.mark.parametrize("change", [
    {"format": "marlin-24"}, {"kv_cache_scheme": {"num_bits": 8}}, {"quant_method": "gptq"},
    {"config_groups": {}}, {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
    {"sparsity_config": {"format": "sparse-24-bitmask"}}, {"sparsity_config": {"targets": ["Linear"]}},
])  # fmt: skip
def test_other_layouts_are_left_to_transformers(change: dict[str, Any]) -> None:
    config = LlamaConfig()
    config.quantization_config = compressed._described(rounded("int8"), SCHEMES["int8"])
    assert compressed.scheme_of(config) == SCHEMES["int8"]
    config.quantization_config |= change
    assert compressed.scheme_of(config) is None


@pytest.mark.parametrize(("place", "key", "value"), [
    ("weights", "symmetric", False), ("weights", "num_bits", 3), ("weights", "actorder", "group"),
    ("input_activations", "dynamic", False), ("input_activations", "num_bits", 4),
    ("weights", "block_structure", [128, 128]), ("input_activations", "scale_dtype", "torch.float8_e4m3fn"),
])  # fmt: skip
def test_details_that_change_the_numbers_are_seen(place: str, key: str, value: Any) -> None:
    config = LlamaConfig()
    config.quantization_config = compressed._described(rounded("w8a8"), SCHEMES["w8a8"])
    assert compressed.scheme_of(config) == SCHEMES["w8a8"]
    config.quantization_config["config_groups"]["group_0"][place][key] = value
    assert compressed.scheme_of(config) is None


def test_what_says_nothing_of_the_numbers_is_passed_over() -> None:
    """As llm-compressor writes it: fields that are empty, and how scales were found."""
    config = LlamaConfig()
    config.quantization_config = compressed._described(rounded("w8a8"), SCHEMES["w8a8"]) | {
        "transform_config": {}, "version": "0.13.0", "global_compression_ratio": None,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []},
    }  # fmt: skip
    group = config.quantization_config["config_groups"]["group_0"]
    group["weights"] |= {"observer": "minmax", "observer_kwargs": {"a": 1}, "block_structure": None, "zp_dtype": "int8"}
    assert compressed.scheme_of(config) == SCHEMES["w8a8"]


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one configuration with other weights."""
    new, old = (tmp_path_factory.mktemp(name) for name in ("new", "old"))
    save_rounded(rounded("int8"), new)
    model = copy.deepcopy(tiny_model("llama", intermediate_size=64))
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    round_weights(model, "int8", torch.device("cpu"), "tiny", False)
    save_rounded(model, old)
    assert not torch.equal(logits(loaded(new)), logits(loaded(old)))
    return new, old


def copied(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place)
    return place


def test_other_files_beside_the_weights_are_not_read(revisions: tuple[Path, Path], tmp_path: Path) -> None:
    new, old = revisions
    folder = copied(new, tmp_path / "model")
    shutil.copy(old / "model.safetensors", folder / "model_before.safetensors")
    assert torch.equal(logits(loaded(folder)), logits(loaded(new)))


def test_shards_that_the_index_does_not_name_are_not_read(revisions: tuple[Path, Path], tmp_path: Path) -> None:
    """As a folder is that a later revision with fewer shards was fetched into."""
    new, old = revisions
    folder = copied(new, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for place, count in ((old, 3), (new, 2)):
        tensors = load_file(place / "model.safetensors")
        names = [f"model-{at + 1:05}-of-{count:05}.safetensors" for at in range(count)]
        files = {name: names[at % count] for at, name in enumerate(sorted(tensors))}
        for file in names:
            part = {name: tensors[name] for name in tensors if files[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert len(list(folder.glob("*.safetensors"))) == 5
    assert torch.equal(logits(loaded(folder)), logits(loaded(new)))


@pytest.mark.parametrize("elsewhere", ["renamed", "named by the configuration", "an adapter's"])
def test_weights_that_lie_elsewhere_are_left_to_transformers(
    elsewhere: str, revisions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Which refuses them here, without the library."""
    folder = copied(revisions[0], tmp_path / "model")
    if elsewhere == "renamed":
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
    elif elsewhere == "an adapter's":
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    else:
        says = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(says | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(ForerunError):
        loaded(folder)


def test_the_tokenizer_goes_with_it(tmp_path: Path) -> None:
    """So that `load` reads the folder; on a CPU weights that were kept for it are in no layout that is written."""
    save(tmp_path / "plain", tiny_model("llama", intermediate_size=64, vocab=VOCAB))
    tokenizer = load_tokenizer(tmp_path / "plain")
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}  # the second lies in a folder within
    save_rounded(rounded("int8", vocab=VOCAB), tmp_path / "rounded", tokenizer)
    again = load_tokenizer(tmp_path / "rounded")
    assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    load_model(tmp_path / "rounded", device="cpu")
    pytest.importorskip("numba")
    kept = load_model(tmp_path / "plain", device="cpu", quantize="int8").model
    with pytest.raises(InvalidArgument, match=r"kept for a CPU \(.*Q8_0\), in no layout of compressed-tensors"):
        save_rounded(kept, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_folder_is_written_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = tmp_path / "model", os.umask(0o027)
    try:
        save_rounded(rounded("int8"), folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    (folder / "notes.txt").write_text("mine")
    want = logits(loaded(folder))

    def full(*call: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ForerunError, match="the disk is full"):
        patch.setattr(compressed, "save_file", full)
        save_rounded(rounded("w8a8"), folder)
    assert torch.equal(logits(loaded(folder)), want) and os.listdir(tmp_path) == ["model"]
    save_rounded(rounded("w8a8"), folder)
    assert torch.equal(logits(loaded(folder)), logits(rounded("w8a8"))) and (folder / "notes.txt").is_file()


def with_experts(folder: Path, one_by_one: bool) -> PreTrainedModel:
    """A model whose attention is rounded, written as it is, or with experts one by one and rounded, as others do."""
    model = copy.deepcopy(tiny_model("qwen2_moe"))
    round_weights(model, "w8a8", torch.device("cpu"), "tiny", False)
    save_rounded(model, folder)
    if not one_by_one:
        return model
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts = tensors.pop(name)
        names, place = (["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]), name.rpartition(".")[0]
        for expert, weights in enumerate(parts):
            for part, weight in zip(names, weights.chunk(len(names)), strict=True):
                values, scales = scaled.rounded_weight(weight, SCHEMES["w8a8"], torch.float32)
                module = f"{place}.{expert}.{part}"
                tensors |= {f"{module}.weight": values.clone(), f"{module}.weight_scale": scales.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def test_experts_that_are_rounded_one_by_one_are_left_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before memory is taken for them: transformers makes one tensor of all, which no rounded weight can be put in."""
    with_experts(tmp_path, one_by_one=True)
    monkeypatch.setattr(LoadRequest, "_from_state", lambda *args: pytest.fail("the model was made"))
    with pytest.raises(UnsupportedModel, match="pip install compressed-tensors"):
        loaded(tmp_path)


def test_experts_that_are_left_wide_are_read(tmp_path: Path) -> None:
    model = with_experts(tmp_path, one_by_one=False)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.0.elsewhere"])
def test_rounded_weights_of_what_is_no_linear_layer_are_left_to_the_library(module: str, tmp_path: Path) -> None:
    save_rounded(rounded("w8a8"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values, scales = scaled.rounded_weight(tensors["model.embed_tokens.weight"], SCHEMES["w8a8"], torch.float32)
    tensors |= {f"{module}.weight": values, f"{module}.weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="pip install compressed-tensors"):
        loaded(tmp_path)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="0 kinds of rounded weights; load it with quantize="):
        save_rounded(tiny_model("llama"), tmp_path)
    save_rounded(rounded("int8"), tmp_path)
    with pytest.raises(InvalidArgument, match="quantised already"):
        loaded(tmp_path, quantize="int8")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.slow
def test_the_library_reads_the_same_weights(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("compressed_tensors")
    model = rounded(scheme)
    save_rounded(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    want = logits(model)
    # Tokens are rounded by scales that are chosen a little otherwise there (127.5 steps, not 127).
    assert float((logits(theirs) - want).norm() / want.norm()) < (5e-2 if scheme == "w8a8" else 1e-2)
