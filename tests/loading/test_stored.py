"""Models whose weights stay as their files store them: which do, that their values are the same, and what they take."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("numba")

import forerun
from forerun.cli import doctor
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.kernels.cpu import choice
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading import STORED, load_model
from forerun.loading.embedded import WHEEL
from forerun.loading.load import LoadRequest
from loading.gguf_writer import Raw, halved, llama_metadata, llama_tensors, tiny_llama, write_gguf
from support.folders import VOCAB, save
from support.stored import stored_rows
from support.tiny import tiny_model


@pytest.fixture(autouse=True)
def _narrow_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: True)


def saved(folder: Path, dtype: torch.dtype) -> Path:
    save(folder, copy.deepcopy(tiny_model("llama", vocab=VOCAB)).to(dtype))
    return folder


def narrow_names(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if isinstance(weight, NarrowWeight)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_and_has_the_values_of_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved(tmp_path, dtype)
    kept, plain = load_model(folder, dtype=STORED, device="cpu").model, load_model(folder, device="cpu").model
    assert not narrow_names(plain)
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"} <= narrow_names(kept)
    assert kept.dtype == plain.dtype == torch.float32
    for (name, mine), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, theirs), name
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(kept(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_float32_files_and_a_refusal_of_kernels_give_plain_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "wide", torch.float32)
    assert not narrow_names(load_model(folder, dtype=STORED, device="cpu").model)
    folder = saved(tmp_path / "half", torch.bfloat16)
    monkeypatch.setenv("FORERUN_KERNELS", "off")
    assert not narrow_names(load_model(folder, dtype=STORED, device="cpu").model)


def test_weights_of_others_and_parts_of_weights_are_left_to_them(tmp_path: Path) -> None:
    request = LoadRequest.of(saved(tmp_path, torch.bfloat16), STORED, "cpu")
    config = request._config()
    assert request._half_dtype(config, tmp_path) == torch.bfloat16
    assert request._half_dtype(config, tmp_path, processes=2) is None
    config.quantization_config = {"quant_method": "bitsandbytes"}  # rounded by its modules while they are loaded
    assert request._half_dtype(config, tmp_path) is None


def test_only_the_files_that_are_read_say_how_weights_are_stored(tmp_path: Path) -> None:
    """transformers reads pytorch_model.bin here; halves of another file must not round it."""
    folder = saved(tmp_path, torch.float32)
    plain = load_model(folder, device="cpu").model
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    halves = {name: tensor.half().clone() for name, tensor in plain.state_dict().items()}
    save_file(halves, folder / "model.fp16.safetensors", metadata={"format": "pt"})
    model = load_model(folder, dtype=STORED, device="cpu").model
    assert not narrow_names(model)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_saving_a_narrow_model_says_what_to_do(tmp_path: Path) -> None:
    kept = load_model(saved(tmp_path / "half", torch.bfloat16), dtype=STORED, device="cpu").model
    with pytest.raises(InvalidArgument, match="dtype='float32'"):
        kept.save_pretrained(tmp_path / "again")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(kept)))
    assert narrow_names(twin) == narrow_names(kept)


def test_a_format_that_is_slower_here_is_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: False)
    folder = saved(tmp_path, torch.bfloat16)
    assert not narrow_names(load_model(folder, dtype=STORED, device="cpu").model)


def test_a_users_gguf_file_keeps_blocks_that_decode_to_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tiny = tiny_llama(tied=False)
    tensors = {name: halved(raw) if len(raw.shape) == 2 else raw for name, raw in llama_tensors(tiny).items()}
    file = write_gguf(tmp_path / "tiny.gguf", llama_metadata(tiny), tensors)
    kept, plain = load_model(file, dtype=STORED, device="cpu").model, load_model(file, device="cpu").model
    assert len(narrow_names(kept)) == 2 * 7 + 2
    for (name, mine), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, theirs), name


def test_a_users_gguf_file_keeps_blocks_of_256(tmp_path: Path) -> None:
    """All three formats in one file, as llama.cpp mixes them."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tiny, kinds = tiny_llama(tied=False, hidden=256, inner=256), {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
    tensors = llama_tensors(tiny)
    matrices = [name for name, raw in tensors.items() if len(raw.shape) == 2]
    for seed, name in enumerate(matrices):
        form = list(kinds)[seed % 3]
        raw, _ = stored_rows(form, *tensors[name].shape, seed)
        tensors[name] = Raw(tensors[name].shape, kinds[form], raw.numpy().tobytes())
    file = write_gguf(tmp_path / "tiny.gguf", llama_metadata(tiny), tensors)
    kept, plain = load_model(file, dtype=STORED, device="cpu").model, load_model(file, device="cpu").model
    formats = {weight.format.name for weight in kept.parameters() if isinstance(weight, NarrowWeight)}
    assert len(narrow_names(kept)) == len(matrices) and formats == set(kinds)
    for (name, mine), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, theirs), name


def test_formats_that_nothing_multiplies_are_told_and_the_others_kept(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tiny, odd = tiny_llama(tied=False), "blk.1.ffn_up.weight"
    tensors = {name: halved(raw) if len(raw.shape) == 2 else raw for name, raw in llama_tensors(tiny).items()}
    count = tensors[odd].shape[0] * tensors[odd].shape[1] // 32
    tensors[odd] = Raw(tensors[odd].shape, 20, (b"\0\x3c" + bytes(range(16))) * count)  # IQ4_NL, a scale of 1
    file = write_gguf(tmp_path / "tiny.gguf", llama_metadata(tiny), tensors)
    kept, plain = load_model(file, dtype=STORED, device="cpu").model, load_model(file, device="cpu").model
    assert len(narrow_names(kept)) == 2 * 7 + 2 - 1 and "model.layers.1.mlp.up_proj.weight" not in narrow_names(kept)
    for (name, mine), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, theirs), name
    assert doctor._weights(str(file), kept) == (
        "as they are stored (F16 x 14): widened in registers, the results of a float32 copy; plain in memory, for want "
        "of products that read them: IQ4_NL x 1"
    )


@pytest.mark.slow
@pytest.mark.skipif(WHEEL.find() is None, reason="the embedded model is not installed")
def test_the_embedded_model_keeps_its_blocks(embedded: Any) -> None:
    model = forerun.load(device="cpu").model
    plain = embedded[0]
    assert len(narrow_names(model)) == 30 * 7 + 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name in ("model.embed_tokens", "model.layers.3.self_attn.q_proj", "model.layers.29.mlp.down_proj"):
        assert torch.equal(model.get_submodule(name).weight.dense(), plain.get_submodule(name).weight), name
    held = {id(w): w.raw.nbytes if isinstance(w, NarrowWeight) else w.nbytes for w in model.parameters()}
    assert sum(held.values()) <= 1.05 * WHEEL.find().stat().st_size  # type: ignore[union-attr]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("scheme", "layers", "ends"),
    [("int8", "Q8_0", "Q8_0"), ("w8a8", "I8", "Q8_0"), ("w8a8-g32", "I8_32", "Q8_0"), ("int4", "Q4_1", "Q8_0")],
)
def test_quantised_on_load(tmp_path: Path, scheme: str, layers: str, ends: str) -> None:
    folder = saved(tmp_path, torch.bfloat16)
    model, plain = forerun.load(folder, device="cpu", quantize=scheme).model, load_model(folder, device="cpu").model
    formats = {name: w.format.name for name, w in model.named_parameters() if isinstance(w, NarrowWeight)}
    assert formats.pop("model.embed_tokens.weight") == ends
    assert formats.pop("lm_head.weight", ends) == ends
    left = {formats.pop(name) for name in list(formats) if "down_proj" in name}
    assert left == {"BF16"}  # 48 inputs are no whole number of groups
    assert set(formats.values()) == {layers} and "model.layers.1.mlp.up_proj.weight" in formats
    near, exact = model.model.layers[0].mlp.up_proj.weight.dense(), plain.model.layers[0].mlp.up_proj.weight
    assert 0 < (near - exact).abs().max() < exact.abs().max() / (7 if scheme == "int4" else 100)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    decoder, drafted = (
        forerun.SpeculativeDecoder(model, None, kernels="off"),
        forerun.SpeculativeDecoder(model, forerun.PromptLookup(), kernels="off"),
    )
    texts = [one.generate(ids, max_new_tokens=12).sequences for one in (decoder, drafted)]
    assert torch.equal(*texts)


def test_what_is_not_quantised_is_told(tmp_path: Path) -> None:
    save(tmp_path, copy.deepcopy(tiny_model("qwen2_moe", vocab=VOCAB, num_experts=16)))
    with pytest.warns(ForerunWarning, match=r"% of the weights .* stay as they are, those of .*Experts"):
        forerun.load(tmp_path, device="cpu", quantize="int8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quantize": "int3"}, "there are 'int8', 'w8a8', 'w8a8-g32', 'int4'"),
        ({"quantize": "int8", "dtype": "bfloat16"}, "computes in float32"),
        ({"quantize_head": True}, r"quantize_head=True.*add quantize="),
    ],
)
def test_what_cannot_be_quantised_is_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        forerun.load(saved(tmp_path, torch.float32), device="cpu", **wrong)


def test_the_head_by_choice(tmp_path: Path) -> None:
    folder = saved(tmp_path, torch.bfloat16)
    for with_head, kind in ((False, "BF16"), (True, "I8")):
        model = forerun.load(folder, device="cpu", quantize="w8a8", quantize_head=with_head).model
        assert {model.lm_head.weight.format.name, model.model.embed_tokens.weight.format.name} == {kind}


@pytest.mark.slow
@pytest.mark.skipif(WHEEL.find() is None, reason="the embedded model is not installed")
def test_a_model_in_blocks_is_not_quantised_again() -> None:
    with pytest.raises(InvalidArgument, match=r"Q(8_0|4_1) already"):
        forerun.load(device="cpu", quantize="int8")
