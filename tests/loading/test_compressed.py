"""Rounded models on disk, in compressed-tensors' format."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.kernels.scaled import ScaledWeight
from forerun.loading import compressed, save_rounded
from forerun.loading.load import LoadRequest
from forerun.loading.rounding import round_weights
from forerun.math import scaled
from forerun.math.scaled import SCHEMES
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
    {"config_groups": {}},
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
])  # fmt: skip
def test_details_that_change_the_numbers_are_seen(place: str, key: str, value: Any) -> None:
    config = LlamaConfig()
    config.quantization_config = compressed._described(rounded("w8a8"), SCHEMES["w8a8"])
    assert compressed.scheme_of(config) == SCHEMES["w8a8"]
    config.quantization_config["config_groups"]["group_0"][place][key] = value
    assert compressed.scheme_of(config) is None


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
