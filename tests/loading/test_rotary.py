"""GGUF files that scale their rotary frequencies: the model has them, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from forerun.errors import UnsupportedModel
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading import STORED, load_model
from loading.gguf_writer import Raw, Typed, halved, llama_metadata, llama_tensors, plain, tiny_llama, write_gguf

F64 = 28  # as llama.cpp counts formats
SIZE = 8  # of a head: four frequencies
THETA = 500_000.0
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
IDS = torch.arange(60).remainder(20)[None]


def written(
    path: Path, metadata: dict[str, Any], tensors: dict[str, Raw], rope: dict[str, Any] | None = None
) -> tuple[Path, Any]:
    """A file with these entries, and the model it came from, with `rope` in its configuration."""
    tiny = tiny_llama(tied=False)
    config = tiny.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": THETA, **(rope or {})}
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(tiny.state_dict())
    given = llama_metadata(model) | {"llama.rope.freq_base": Typed("f32", THETA)} | metadata
    return write_gguf(path / "tiny.gguf", given, llama_tensors(model) | tensors), model


def factors_of(factor: float) -> torch.Tensor:
    """As llama.cpp's converter computes them, one frequency at a time."""
    found = []
    for i in range(SIZE // 2):
        share = 8192 * THETA ** (-2 * i / SIZE) / (2 * torch.pi)  # of the old context in one turn
        smooth = min(max((share - 1) / 3, 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_those_of_its_configuration(tmp_path: Path, factor: float) -> None:
    factors = factors_of(factor)
    assert factors[0] == 1 and 1 < factors[2] < factor and factors[3] == factor
    rope = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    file, model = written(tmp_path, {}, {"rope_freqs.weight": plain(factors)}, rope)
    read = load_model(file, device="cpu").model
    assert read.config.rope_parameters["rope_type"] == "llama3"
    assert torch.equal(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(read(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_linear_scaling(tmp_path: Path, key: str) -> None:
    metadata = {"llama.rope.scaling.type": "linear", key: Typed("f32", 4.0)}
    file, model = written(tmp_path, metadata, {}, {"rope_type": "linear", "factor": 4.0})
    assert torch.equal(load_model(file, device="cpu").model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("metadata", "tensors", "what"),
    [
        ({}, {"rope_freqs.weight": [1.0, 2.0, 3.0, 4.0]}, r"rope_freqs\.weight"),
        ({}, {"rope_freqs.weight": [1.0, 2.0]}, r"rope_freqs\.weight"),
        ({}, {"rope_factors_long.weight": [1.0, 2.0, 3.0, 4.0]}, r"rope_factors_long\.weight"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": Typed("f32", 4.0)}, {}, "yarn"),
        ({"llama.rope.scaling.attn_factor": Typed("f32", 1.2)}, {}, "attn_factor"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, list[float]], what: str
) -> None:
    file, _ = written(tmp_path, metadata, {name: plain(torch.tensor(one)) for name, one in tensors.items()})
    with pytest.raises(UnsupportedModel, match=rf"{what}.*another model's; load the model's own folder"):
        load_model(file, device="cpu")


def test_factors_of_another_family_are_refused(tmp_path: Path) -> None:
    tiny = tiny_llama(tied=False)
    metadata = {key.replace("llama.", "gemma3."): value for key, value in llama_metadata(tiny).items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.rope.scaling.factor": Typed("f32", 8.0)}
    with pytest.raises(UnsupportedModel, match=r"'gemma3' model .*linear"):
        load_model(write_gguf(tmp_path / "tiny.gguf", metadata, llama_tensors(tiny)), device="cpu")


def test_factors_in_a_format_that_is_not_read_are_refused(tmp_path: Path) -> None:
    """transformers would ignore them, and answer with another model's text."""
    factors = {"rope_freqs.weight": Raw((SIZE // 2,), F64, factors_of(8.0).double().numpy().tobytes())}
    file, _ = written(tmp_path, {}, factors)
    with pytest.raises(UnsupportedModel, match=r"'rope_freqs.weight'.*format 28.*convert the file anew"):
        load_model(file, device="cpu")


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_factors_of_one_change_nothing_and_blocks_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("numba")
    from forerun.kernels.cpu import choice

    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: True)
    halves = {name: halved(raw) for name, raw in llama_tensors(tiny_llama(tied=False)).items() if len(raw.shape) == 2}
    ones = {"rope_freqs.weight": plain(torch.ones(SIZE // 2))}
    file, _ = written(tmp_path, {"llama.rope.scaling.type": kind}, halves | ones)
    read = load_model(file, dtype=STORED, device="cpu").model
    assert read.config.rope_parameters["rope_type"] == "default"
    assert sum(isinstance(weight, NarrowWeight) for weight in read.parameters()) == len(halves)
