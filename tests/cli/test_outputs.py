"""Where results go: places that cannot be written are named before any work, and what is finished is never lost."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.command import Command
from forerun.cli import main, prompts
from forerun.cli.main import cli
from forerun.engine import Engine
from forerun.train.shards import Manifest, ShardWriter, TrainingText
from support.folders import VOCAB
from train.texts import markov_target, written_by

FULL = Path("/dev/full")
RECORD = str(Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-batch4.json")
SHORT = ("--max-new-tokens", "12", "-d", "none")
full_device = pytest.mark.skipif(not FULL.is_char_device(), reason="there is no /dev/full")


@full_device
def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "forerun", "--help"]
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "Error: standard output cannot be written: No space left on device; make room, or send it elsewhere\n"
    )


@full_device
@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"], ["bench", "show", RECORD]])
def test_no_command_shows_a_traceback_for_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        monkeypatch.undo()
    assert left.value.code == 2
    assert "standard output cannot be written" in capsys.readouterr().err


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded before the output was looked at")

    for name in ("load_model", "load_tokenizer", "load_speech_model"):
        monkeypatch.setattr(f"forerun.loading.{name}", refuse)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three sequences of training data."""
    entry = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB}
    writer = ShardWriter(tmp_path / "data", Manifest(entry, 0, {}))
    for i, row in enumerate(written_by(markov_target(VOCAB), 3, 16, first=5)):
        writer.add(i, TrainingText(row, 2))
    writer.flush()
    return tmp_path / "data"


OUTPUTS = {
    "train draft": ("train", "draft", "MODEL", "--data", "{data}", "-o", "{bad}"),
    "train draft, data first": ("train", "draft", "MODEL", "-p", "{text}", "-o", "{bad}"),
    "train data": ("train", "data", "MODEL", "-p", "{text}", "-o", "{bad}"),
    "train ngram": ("train", "ngram", "{text}", "-o", "{bad}/table.safetensors"),
    "train eval": ("train", "eval", "MODEL", "{data}", "-p", "{text}", "-o", "{bad}/e.json"),
    "transcribe": ("transcribe", "{text}", "-o", "{bad}"),
    "plan": ("plan", "--output", "{bad}/r.json"),
    "plan, picture": ("plan", "--plot", "{bad}/r.png"),
    "bench": ("bench", "--output", "{bad}/r.json"),
    "bench, a device": ("bench", "--output", "/dev/null"),
}


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_place_that_cannot_be_written_is_named_first(name: str, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n")
    places = {"bad": str(text / "inside"), "text": str(text), "data": str(data)}
    result = CliRunner().invoke(cli, [part.format(**places) for part in OUTPUTS[name]])
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert ("/dev/null" if name == "bench, a device" else places["bad"]) in result.stderr


@pytest.mark.usefixtures("nothing_loads")
def test_too_little_data_is_said_before_anything_is_loaded(data: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["train", "draft", "MODEL", "--data", str(data), "-o", str(tmp_path / "d")])
    assert result.exit_code == 2, result.exception
    assert "the data has 3 sequences and 64 are to be held out" in result.stderr


@pytest.mark.usefixtures("nothing_loads")
def test_a_run_that_cannot_go_on_is_said_before_anything_is_loaded(data: Path, tmp_path: Path) -> None:
    common = ["train", "draft", "MODEL", "--data", str(data), "--hold-out", "1", "-o", str(tmp_path / "d")]
    assert "to resume from" in CliRunner().invoke(cli, [*common, "--resume"]).stderr
    assert not (tmp_path / "d").exists(), "a refused run leaves no folder"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "checkpoint.pt").write_bytes(b"x")
    assert "holds a run already" in CliRunner().invoke(cli, common).stderr


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third round."""
    step, rounds = Engine.step, []

    def count(engine: Engine) -> Any:
        rounds.append(1)
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", count)


def test_control_c_keeps_the_text_so_far(
    generate: Command, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = tmp_path / "p.txt"
    file.write_text("hello\nand more\n")
    whole = generate("-m", target, "-q", *SHORT, "-f", str(file)).stdout
    request.getfixturevalue("interrupted")
    cut = generate("-m", target, *SHORT, "-f", str(file))
    assert cut.exit_code == main.INTERRUPTED
    texts = cut.stdout.split("\n\n")
    assert len(texts) == 2
    for got, full in zip(texts, whole.split("\n\n"), strict=True):
        assert 0 < len(got.strip("\n")) < len(full.strip("\n"))
        assert full.startswith(got.rstrip("\n"))
    assert "Stopped by Ctrl-C" in cut.stderr


@pytest.mark.usefixtures("interrupted")
def test_control_c_leaves_whole_json(generate: Command, target: str) -> None:
    result = generate("-m", target, "--json", *SHORT, "hello")
    entry = json.loads(result.stdout)["prompts"][0]["texts"][0]
    assert (result.exit_code, entry["finish_reason"], len(entry["token_ids"])) == (main.INTERRUPTED, "abort", 3)


@pytest.mark.parametrize("text", ["one\n\ntwo\n", '{"prompt": "one"}\n{"text": "two"}\n'])
def test_a_dash_reads_a_file_of_prompts_from_standard_input(generate: Command, target: str, text: str) -> None:
    result = generate("-m", target, "--json", *SHORT, "-f", "-", stdin=text)
    assert [entry["prompt"] for entry in json.loads(result.stdout)["prompts"]] == ["one", "two"]


def test_standard_input_is_read_once(generate: Command, target: str) -> None:
    result = generate("-m", target, "-", "-f", "-", stdin="x\n")
    assert result.exit_code == 2
    assert "asked for twice" in result.stderr


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8"))
    with pytest.raises(prompts.InvalidArgument, match="standard input is not text"):
        prompts.read_prompts(["-"], None)


def test_a_piped_turn_that_is_too_long_is_said(chat: Command, target: str) -> None:
    long = "x" * 2000
    result = chat("-m", target, "-q", *SHORT, stdin=f"hello\n{long}\nhello\n")
    first, answer, *_ = result.stdout.split("\n")
    assert first
    assert answer == ""
    assert result.exit_code == 1
    assert "turn 2: this message alone has" in result.stderr
    assert "send a shorter one" in result.stderr


def test_a_system_error_elsewhere_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "x"))

    monkeypatch.setattr(os, "get_terminal_size", denied)
    monkeypatch.setattr(main.LazyCommand, "load", denied)
    result = CliRunner().invoke(cli, ["doctor"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Permission denied" in result.stderr
