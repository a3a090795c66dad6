"""`load_model` and `load_tokenizer`: what a name means, what is chosen, and what is said when nothing is found."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from forerun.errors import InvalidArgument, ModelNotFound, UnsupportedModel
from forerun.loading import embedded, load_model, load_tokenizer
from forerun.loading.source import resolve
from loading.gguf_writer import tiny_llama, write_llama


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
        ({"device": "gpu please"}, "device='gpu please'"),
        ({"revision": "v1"}, "revision='v1'"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_model(folder, **wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no CUDA device"):
        load_model(folder, device="cuda")
