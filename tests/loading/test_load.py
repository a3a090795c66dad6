"""`load_model` and `load_tokenizer`: what a name means, what is chosen, and what is said when nothing is found."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from forerun.errors import ForerunError, ForerunWarning, InvalidArgument, ModelNotFound, UnsupportedModel
from forerun.loading import LoadedModel, embedded, load, load_model, load_speech_model, load_tokenizer, sizes
from forerun.loading.source import resolve
from forerun.models.quantised import describe_weights, method_of
from loading.gguf_writer import TOKENS, Typed, plain, tiny_llama, write_gguf, write_llama
from support.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    path = place / "tiny"
    path.mkdir()
    embedded.convert(write_llama(place / "tiny.gguf"), path)
    return path


def test_a_folder_is_loaded_in_float32_on_the_cpu(folder: Path) -> None:
    model, tokenizer = load_model(str(folder), device="cpu")
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"
    assert not model.training
    assert tokenizer.padding_side == "left"


def test_load_gives_names_and_takes_encoder_decoder_models(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder, device="cpu")
    assert isinstance(loaded, LoadedModel) and loaded == (loaded.model, loaded.tokenizer)
    assert loaded.tokenizer("a").input_ids == load_tokenizer(folder)("a").input_ids
    tiny_model("t5").save_pretrained(tmp_path)
    load_tokenizer(folder).save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path, device="cpu", dtype="float64")
    assert model.config.is_encoder_decoder and model.dtype == torch.float64 and tokenizer.padding_side == "left"


@pytest.mark.parametrize("place", ["num_hidden_layers", "text_config", "decoder_layers"])
def test_absurd_layer_counts_are_refused_before_anything_is_built(folder: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    odd = {place: {"num_layers": 10**9} if place == "text_config" else 10**9}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | odd))
    with pytest.raises(UnsupportedModel, match=r"layers=1000000000 in its configuration"):
        load_model(tmp_path / "odd", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1000, "intermediate_size": 4096}, r"asks for [\d,]{11,} parameters"),
        (
            {"hidden_size": 10**6, "head_dim": 8},
            r"asks for [\d,]{11,} parameters in its configuration and its files hold",
        ),
        ({"intermediate_size": 10**9}, r"asks for [\d,]{12,} parameters"),
        ({"vocab_size": 10**10}, r"asks for [\d,]{12,} parameters"),
    ],
)
def test_a_configuration_that_asks_for_more_than_the_weights_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], message: str
) -> None:
    """Before transformers takes the memory: terabytes in these cases."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("memory was taken"))
    shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path / "odd", device="cpu")


def test_other_files_of_the_folder_are_not_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are in pytorch_model.bin; an adapter's few numbers beside them refuse nothing."""
    monkeypatch.setattr(sizes, "SMALL", 0)
    shutil.copytree(folder, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    torch.save(load_file(weights), tmp_path / "model/pytorch_model.bin")
    weights.unlink()
    save_file({"x": torch.zeros(4)}, tmp_path / "model/adapter_model.safetensors", metadata={"format": "pt"})
    ours, theirs = load_model(tmp_path / "model", device="cpu").model, load_model(folder, device="cpu").model
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_honoured(folder: Path, dtype: Any) -> None:
    assert load_model(folder, dtype=dtype, device="cpu")[0].dtype == torch.bfloat16


@pytest.fixture
def talkative() -> Iterator[None]:
    """transformers as chatty as it gets by request."""
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    yield
    logging.set_verbosity(before)


@pytest.mark.usefixtures("talkative")
def test_loading_is_silent_and_leaves_settings_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_tokenizer_without_padding_gets_some(tmp_path: Path) -> None:
    fast = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>").save_pretrained(tmp_path)
    tiny_llama(tied=True).config.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.padding_side) == (1, "left")


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "~/absent", "a/b/c", "a//b", "/absent/x.gguf", "./x.gguf", "x.gguf", ""]
)
def test_a_missing_path_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="check the path"):
        load_model(name, offline=True)


def test_what_is_there_but_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="is a file"):
        load_model(tmp_path / "weights.bin")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "m.Q4.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"m\.Q4\.gguf"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match="cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(UnsupportedModel, match="never-heard-of"):
        load_model(tmp_path)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_name_without_network_names_the_command(load: Any) -> None:
    with pytest.raises(ModelNotFound, match=r"network is off.*hf download nobody/absent-model") as caught:
        load("nobody/absent-model", offline=True)
    assert "\n" not in str(caught.value)


def test_the_environment_can_say_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="network is off"):
        load_tokenizer("nobody/absent-model")


def test_names_are_told_from_paths(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not resolve("owner/name").is_local
    assert (resolve("owner/name/f.gguf").location, resolve("owner/name/f.gguf").gguf_file) == ("owner/name", "f.gguf")
    file = folder.parent / "tiny.gguf"
    assert (resolve(file).location, resolve(file).gguf_file) == (str(folder.parent), "tiny.gguf")
    monkeypatch.chdir(folder.parent.parent)
    beside = f"{folder.parent.name}/{folder.name}"  # reads like owner/name, but it is here
    assert resolve(beside).is_local


def test_gguf_without_its_package_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ModelNotFound, match=r"needs gguf .*pip install 'forerun\[gguf\]'"):
        load_model(folder.parent / "tiny.gguf")


def test_weights_of_a_gguf_file_are_plain(folder: Path, tmp_path: Path) -> None:
    """transformers leaves word of a quantisation behind; what is decoded can be quantised, copied and saved."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = folder.parent / "tiny.gguf"
    model = load_model(file, dtype="float32", device="cpu").model
    assert method_of(model) is None and describe_weights(model) == "plain float32"
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    pytest.importorskip("numba")
    rounded = load_model(file, dtype="float32", device="cpu", quantize="int8").model
    assert "Q8_0" in describe_weights(rounded)


def test_the_tokenizer_of_a_gguf_file_cuts_as_the_file_says(folder: Path, tmp_path: Path) -> None:
    """Digits are cut out first, so two spaces before one are merged; transformers takes the file for GPT-2's."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    mine, right = load_tokenizer(folder.parent / "tiny.gguf"), load_tokenizer(folder)
    for text in ("a   0", "ab 12  3\n<|im_end|>", "   9"):
        assert mine(text).input_ids == right(text).input_ids
    assert (mine.eos_token_id, mine.pad_token_id, mine.padding_side) == (2, 2, "left")
    odd = write_llama(tmp_path / "odd.gguf", change=lambda m: m.update({"tokenizer.ggml.pre": "chameleon"}))
    with pytest.warns(ForerunWarning, match="cuts its text by 'chameleon', which transformers does not know"):
        load_tokenizer(odd)


@pytest.mark.parametrize("change", [
    {"tokenizer.ggml.pre": "llama-bpe"},
    {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": Typed("bool", True)},
])  # fmt: skip
def test_a_tokenizer_that_transformers_knows_is_its_own(tmp_path: Path, change: dict[str, Any]) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = write_llama(tmp_path / "other.gguf", change=lambda m: m.update(change))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        assert load_tokenizer(file)("ab").input_ids[-1] == TOKENS.index("ab")


def test_a_part_of_a_gguf_file_says_how_to_join_all(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    split = {"split.no": Typed("u16", 1), "split.count": Typed("u16", 3)}
    file = write_gguf(tmp_path / "tiny-00002-of-00003.gguf", split, {"blk.1.attn_norm.weight": plain(torch.ones(4))})
    with pytest.raises(UnsupportedModel, match=r"is part 2 of 3 of a model; join .* llama-gguf-split --merge"):
        load_model(file, device="cpu")


def test_a_gguf_file_through_transformers(folder: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model, tokenizer = load_model(folder.parent / "tiny.gguf", device="cpu")
    ours = load_model(folder, device="cpu")[0].state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in model.state_dict().items())
    assert tokenizer("ab a").input_ids == load_tokenizer(folder)("ab a").input_ids


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float33"}, "dtype='float33'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),  # which torch's modules cannot add up
        ({"device": "gpu please"}, "device='gpu please'"),
        ({"device": "mps"}, "device='mps': models run on 'cpu' and on 'cuda'"),
        ({"device": torch.device("meta")}, "device='meta': models run on 'cpu' and on 'cuda'"),
        ({"revision": "v1"}, "revision='v1'"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_model(folder, **wrong)


def test_a_folder_without_a_tokenizer_says_so(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "token" not in file.name:
            shutil.copy(file, tmp_path)
    with pytest.raises(UnsupportedModel, match="holds no tokenizer that can be read"):
        load_model(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no CUDA device"):
        load_model(folder, device="cuda")


def test_a_gpu_beyond_the_last_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidArgument, match=r"device='cuda:2': the last CUDA device here is 'cuda:1'"):
        load_model(folder, device="cuda:2")


CODE = "open({ran!r}, 'w')\nfrom transformers import LlamaConfig\nclass Odd(LlamaConfig):\n    model_type = 'odd'\n"


@pytest.fixture
def with_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings Python code, and somebody at the terminal who says yes to everything."""
    place = tmp_path / "with-code"
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.Odd"}}
    (place / "config.json").write_text(json.dumps(config))
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": [None, "odd.Odd"]}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "odd.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return place


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_speech_model])
def test_code_in_a_folder_is_never_run(with_code: Path, load: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"never runs.*trust_remote_code=True.*SpeculativeDecoder"):
        load(with_code)
    assert not (with_code.parent / "ran").exists()


def copy_with(folder: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a model folder with other weights in it."""
    shutil.copytree(folder, place)
    weights = load_file(place / "model.safetensors")
    change(weights)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


def test_missing_weights_are_refused_not_drawn(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weight of a LlamaForCausalLM \(model\.layers\.1\.mlp"):
        load_model(copy_with(folder, tmp_path / "m", lambda weights: weights.pop(name)), device="cpu")


def test_weights_that_nobody_uses_are_said(folder: Path, tmp_path: Path) -> None:
    place = copy_with(folder, tmp_path / "m", lambda weights: weights.update(odd=torch.zeros(2)))
    with pytest.warns(ForerunWarning, match=r"holds 1 weight .*not used \(odd\)"):
        load_model(place, device="cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_not_missing(tmp_path: Path, tied: bool, folder: Path) -> None:
    tiny_llama(tied=tied).save_pretrained(tmp_path)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    assert load_model(tmp_path, device="cpu")[0].config.tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", lambda old: old[: len(old) // 2], r"model\.safetensors' is damaged"),
        ("model.safetensors", lambda old: old[:5], r"model\.safetensors' is damaged"),
        ("config.json", lambda old: b"[" * 100_000, r"config\.json' is damaged.*nested too deeply"),
        ("config.json", lambda old: old[:-20], r"config\.json' is damaged.*not JSON"),
        ("tokenizer.json", lambda old: old[:-20], r"tokenizer\.json' is damaged"),
        ("config.json", lambda old: old.replace(b'"vocab_size": 26', b'"vocab_size": "wide"'), "cannot be loaded"),
        ("config.json", lambda old: b"[1, 2]", "cannot be loaded"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, name: str, content: Any, message: str) -> None:
    place = tmp_path / "m"
    shutil.copytree(folder, place)
    old = (place / name).read_bytes()
    (place / name).write_bytes(content(old))
    assert (place / name).read_bytes() != old
    with pytest.raises(ForerunError, match=message) as caught:
        load_model(place, device="cpu")
    assert "\n" not in str(caught.value)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_checkpoint_cannot_run_code(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "m"
    shutil.copytree(folder, place)
    (place / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb(tmp_path / "ran")}, place / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(place, device="cpu")
    assert not (tmp_path / "ran").exists()
    (place / "pytorch_model.bin").write_bytes(b"PK\x03\x04 no checkpoint")
    with pytest.raises(ForerunError, match="cannot be"):
        load_model(place, device="cpu")
