"""What the doctor says about compiled kernels: with Numba, without it, about a model, about a family it cannot fuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LEDConfig, LEDForConditionalGeneration, WhisperFeatureExtractor, WhisperProcessor

from forerun import kernels
from forerun.cli import doctor_cpu
from forerun.cli.main import cli
from support.folders import save
from support.tiny import tiny_model
from support.whisper import tiny_whisper, tokenizer

needs_kernels = pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    if kernels.why_not_numba() is None:
        from forerun.kernels.cpu import choice, measured

        measured.forget()
        choice._wins.cache_clear()
    return tmp_path / "cache"


def _on_the_cpu(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return (*arguments, "--device", "cpu") if "--model" in arguments else arguments


def whole_report(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["doctor", "--json", *_on_the_cpu(arguments)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def report(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = whole_report(*arguments)["cpu_kernels"]
    return found


def table(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["doctor", *_on_the_cpu(arguments)], env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    return result.output


@needs_kernels
def test_with_numba_and_nothing_measured(own_cache: Path) -> None:
    found = report()
    assert found["available"] and found["missing"] is None
    assert found["threading_layer"] in ("omp", "tbb", "workqueue")
    assert (found["threads"], found["setting"]) == (1, "off")
    assert found["cache_file"].startswith(str(own_cache))
    assert found["products"] == found["bodies"] == [] and found["model"] is None
    assert not own_cache.exists(), "a look must not leave anything behind"


@needs_kernels
def test_a_model_is_measured_once_and_explained(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "on")
    first, second = report("--model", target), report("--model", target)
    assert first == second, "the second look must find the first one's measurements"
    model = first["model"]
    assert model["fused"] and model["why"] == "all layers in one call, 1 thread"
    assert model["measured"]["modules_ms"] > 0 and set(model["measured"]["fused_ms"]) == {"1"}
    assert 0 < model["extra_bytes"] < 1 << 20
    assert len(first["bodies"]) == 1
    shown = table("--model", target)
    for words in ("passes of 1 + 4 + 16 tokens: modules", "no copy of weights", "MiB of scratch and tables"):
        assert words in shown


@needs_kernels
def test_what_is_known_is_listed_without_a_model(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.kernels.cpu import choice

    times = {str(size): ((1.0, 2.0) if size <= 4 else (2.0, 1.0)) for size in choice.BUCKETS}
    monkeypatch.setattr(choice, "compare", lambda shape, threads: times)
    choice._wins((8, 16), 1)
    shown = table()
    assert "weight 8x16" in shown
    assert "ours for 1, 2, 4 rows; torch's for 8, 16, 32 rows (1 thread)" in shown


@needs_kernels
def test_switched_off_and_slower(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report("--model", target)["model"]["why"] == "kernels are off"
    from forerun.models.bodies import choose

    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choose, "measured", lambda model: {"modules": 1.0, "1": 2.0})
    assert report("--model", target)["model"]["why"] == "the modules measured faster"


@needs_kernels
def test_a_family_that_is_not_fused(tmp_path: Path) -> None:
    folder = save(tmp_path / "falcon", tiny_model("falcon_alibi", vocab=258))
    model = report("--model", folder)["model"]
    assert not model["fused"] and "ALiBi" in model["why"]


def test_a_model_behind_an_encoder_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Whisper as `transcribe` loads it, any other as `generate` does. Their passes are not timed here."""
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    t5 = save(tmp_path / "t5", tiny_model("t5_gated", vocab=258))
    found = whole_report("--model", t5)
    assert found["layers"] == "by its modules, on cpu: a t5, not a Whisper as published"
    assert found["cpu_kernels"]["model"] is None and found["self_check"] and found["weights"] == "plain float32"

    monkeypatch.setenv("FORERUN_KERNELS", "off")
    whisper = str(tmp_path / "whisper")
    tiny_whisper().save_pretrained(whisper)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    WhisperProcessor(extractor, tokenizer()).save_pretrained(whisper)
    found = whole_report("--model", whisper)
    assert found["layers"] == "by its modules, on cpu: kernels are off" and found["self_check"]
    assert "by its modules, on cpu: kernels are off" in table("--model", whisper)


@pytest.mark.parametrize("family", ["mamba", "led"])
def test_a_model_that_is_refused_is_reported(family: str, tmp_path: Path) -> None:
    """With the reason, in a report that says all the rest."""
    config = LEDConfig(vocab_size=258, d_model=16, encoder_layers=1, decoder_layers=1, attention_window=4)
    model = tiny_model("mamba", vocab=258) if family == "mamba" else LEDForConditionalGeneration(config)
    folder = save(tmp_path / family, model)
    found = whole_report("--model", folder)
    assert found["self_check"].startswith("refused: ") and found["weights"] == "plain float32"
    described = [found["layers"], (found["cpu_kernels"]["model"] or {}).get("why")]
    if family == "led" or kernels.why_not_numba() is None:
        assert found["self_check"] in described
    assert "refused: " in table("--model", folder)


def test_a_device_without_a_model_is_refused() -> None:
    """Nothing is run there, so that it would be ignored."""
    result = CliRunner().invoke(cli, ["doctor", "--device", "cuda:7"])
    assert result.exit_code == 2 and "--device 'cuda:7' says where --model is run" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which is taken")
def test_a_model_is_looked_at_where_it_is_asked_for(target: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--model", target, "--device", "cuda"])
    assert result.exit_code != 0 and "--device 'cuda': torch sees no CUDA device" in result.output


def test_without_numba(target: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not_numba", lambda: "No module named 'numba'; pip install numba")
    found = report("--model", target)
    assert not found["available"] and found["threading_layer"] is None
    assert "numba" in found["model"]["why"] and not found["model"]["fused"]
    shown = table()
    for words in ("missing (No module named 'numba'; pip install numba", "torch's products", "a half to a quarter"):
        assert words in shown
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("environment", "count", "why"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3, "OMP_NUM_THREADS=3"),
        ({"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"}, 2, "NUMBA_NUM_THREADS=2"),
        ({}, 10**6, "torch's own number"),
    ],
)
def test_why_so_many_threads(
    environment: dict[str, str], count: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert doctor_cpu._why(count).startswith(why)
