"""The scripts of examples/ run, on a tiny model with a byte tokenizer."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.folders import VOCAB, save
from support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("examples"), tiny_model("llama", vocab=VOCAB))


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A script as `python examples/NAME.py ARGUMENTS` would run it; what it printed."""

    def runs(name: str, *arguments: str, stdin: str = "") -> str:
        script = str(ROOT / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return runs


def test_every_example_is_run_here_and_listed() -> None:
    tested = {name.removeprefix("test_example_") for name in globals() if name.startswith("test_example_")}
    assert tested == set(EXAMPLES) and len(EXAMPLES) == 6
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in page for name in EXAMPLES)


@pytest.mark.parametrize("name", ("batch_of_files", "train_head"))
def test_without_its_argument_it_says_what_it_takes(run: Run, name: str) -> None:
    with pytest.raises(SystemExit, match=f"python examples/{name}.py"):
        run(name)


def test_example_generate(run: Run, model: str) -> None:
    out = run("generate", model)
    assert out.startswith("The capital of France is |") and "tokens a round" in out


def test_example_own_drafter(run: Run, model: str) -> None:
    """The second call repeats the first one's text, so that drafts are kept."""
    first, second = (float(line.split()[2]) for line in run("own_drafter", model).splitlines()[:2])
    assert first < 2 < second


def test_example_stream(run: Run, model: str) -> None:
    out = run("stream", model)
    assert out.count("|") > 5 and "seed 1" in out


def test_example_chat(run: Run, model: str) -> None:
    assert run("chat", model, stdin="Hello\nAnd now?\n\n").count("\n") >= 2


def test_example_batch_of_files(run: Run, model: str, tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("word " * (number + 1))
    assert "10 of 10 files" in run("batch_of_files", str(tmp_path), model)
    assert len(list(tmp_path.glob("*.out"))) == 10


@pytest.mark.slow
def test_example_train_head(run: Run, model: str, tmp_path: Path) -> None:
    assert "tokens a round" in run("train_head", str(tmp_path), model, "2")
    assert (tmp_path / "head" / "forerun.json").exists()
