"""llama.cpp as a peer: what it is asked, how it takes turns with Forerun, and what happens where it is not at hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import forerun.loading
from forerun.bench import costs, methods
from forerun.bench.llamacpp import server
from forerun.bench.llamacpp.peer import BindingPeer, PeerSettings, ServerPeer, find
from forerun.cli.main import cli
from forerun.errors import ForerunError, InvalidArgument, ServerError
from forerun.measure.memory import peak_bytes, peak_of_script
from forerun.measure.record import load
from support.bench import WordTokenizer
from support.llama_server import write_llama_server
from support.processes import is_running, wait_for
from support.tiny import draft_of, tiny_model

SHORT = (
    "--max-new-tokens", "4", "--prompts-per-category", "1", "--categories", "qa", "--batch-sizes", "1,2",
    "--prompt-lengths", "6", "--kernels", "off",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_DATA", raising=False)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that only a stand-in reads."""
    monkeypatch.setattr(forerun.loading, "load_model", stand_in)
    monkeypatch.setattr(methods, "peak_of_script", lambda *words: 3 << 20)
    monkeypatch.setattr(costs, "peak_of_script", lambda *words: 1 << 20)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def stand_in(name_or_path: str, *, quantize: str | None = None, **_: Any) -> tuple[Any, WordTokenizer]:
    target = tiny_model("llama")
    return (target if quantize is None else draft_of(target)), WordTokenizer()


def bench_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments], env={"COLUMNS": "200"})


def asked_of(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()]


def test_a_server_takes_turns_with_forerun(model: Path, tmp_path: Path) -> None:
    program, notes = write_llama_server(tmp_path)
    output = tmp_path / "r.json"
    result = bench_command(
        *SHORT, "-m", str(model), "--peer", "llama.cpp", "--llama-server", str(program), "--quantize", "int8",
        "--methods", "llama.cpp-ngram-mod,forerun-plain", "-o", str(output),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = load(output)
    names = ["llama.cpp", "llama.cpp-ngram-mod", "forerun-plain", "forerun-int8-plain", "forerun-int8"]
    assert list(record.details["titles"]) == names
    assert [(row["batch"], row["method"]) for row in record.rows] == [(rows, name) for rows in (1, 2) for name in names]
    copied = next(row for row in record.rows if row["method"] == "llama.cpp-ngram-mod")
    assert (copied["drafted"], copied["accepted"], copied["rounds"], copied["new_tokens"]) == (4, 2, 2, 4)
    # another program's text is its own; the second method of a target is held to its first
    held = {row["method"] for row in record.rows if row["agreement"] is not None}
    assert held == {"forerun-int8"}
    prompts = {(each["method"], each["tokens"]) for each in record.details["prompt_times"]}
    assert prompts == {(name, 6) for name in ("llama.cpp", "forerun-plain", "forerun-int8-plain")}
    memory = {each["title"]: each["peak_bytes"] for each in record.details["memory"]}
    assert memory["Forerun plain"] == 3 << 20 and memory["Python and its libraries alone"] == 1 << 20
    if sys.platform == "linux":
        assert memory["llama.cpp"] > 1 << 20
    assert "times as fast as llama.cpp" in result.output and "Prompts: tokens a second" in result.output
    assert str(tmp_path) not in output.read_text()

    asked = asked_of(notes)
    assert {each["path"] for each in asked} == {"/completion"}
    for each in asked:
        assert each["ignore_eos"] and each["return_tokens"] and not each["cache_prompt"]
        assert each["temperature"] == 0 and all(isinstance(token, int) for token in each["prompt"])
    given = [each["given"] for each in asked]
    assert {each["--parallel"] for each in given} == {"2"} and {each["--model"] for each in given} == {str(model)}
    assert {each.get("--spec-type") for each in given} == {None, "ngram-mod"}
    lengths = [len(each["prompt"]) for each in asked]
    assert int(given[0]["--ctx-size"]) >= 2 * (max(lengths) + 4)


@pytest.mark.slow
def test_a_drafter_that_is_no_model_beside_it(model: Path, tmp_path: Path) -> None:
    program, notes = write_llama_server(tmp_path)
    result = bench_command(
        *SHORT, "-m", str(model), "--peer", "llama.cpp", "--llama-server", str(program), "--draft", "self:8",
        "-o", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    titles = load(tmp_path / "r.json").details["titles"]
    assert titles["forerun-draft"] == "Forerun self:8" and "llama.cpp-draft-simple" not in titles
    assert not any("--model-draft" in each["given"] for each in asked_of(notes))


def test_without_llama_cpp_the_rest_is_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.bench.compare.find", lambda program: None)
    result = bench_command(
        *SHORT, "-m", str(model), "--peer", "llama.cpp", "--methods", "forerun-plain", "-o", str(tmp_path / "r.json")
    )
    assert result.exit_code == 0, result.output
    assert "llama.cpp is left out" in result.output and "pip install llama-cpp-python" in result.output
    assert list(load(tmp_path / "r.json").details["titles"]) == ["generate", "forerun-plain"]


def test_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = write_llama_server(tmp_path)
    named = find(str(program))
    assert isinstance(named, ServerPeer) and named.program == program
    assert named.names(False) == ("llama.cpp", "llama.cpp-ngram-simple", "llama.cpp-ngram-mod")
    assert "llama.cpp-draft-simple" in named.names(True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find() == named
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "llama_cpp" else None)
    assert isinstance(find(), BindingPeer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find() is None
    with pytest.raises(InvalidArgument, match="nothing-here"):
        find("nothing-here")
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(ForerunError, match="does not run"):
        find(str(tmp_path / "broken"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "llama.cpp", "--llama-server", "/nothing/here"], "/nothing/here"),
        (["--llama-server", "x"], "--peer"),
        (["--peer", "vllm"], "llama.cpp"),
        (["--prompt-lengths", "1"], "--prompt-lengths 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: Path, arguments: list[str], message: str) -> None:
    result = bench_command("-m", str(model), *arguments)
    assert result.exit_code == 2 and message in result.output


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = bench_command("-m", str(tmp_path), "--peer", "llama.cpp")
    assert result.exit_code == 2 and "GGUF" in result.output


def settings_of(tmp_path: Path, **options: Any) -> server.ServerSettings:
    program, _ = write_llama_server(tmp_path, **options)
    return server.ServerSettings(program, tmp_path / "m.gguf", rows=1, context=300, threads=1, on_gpu=False)


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="failed to load model"), server.started(settings_of(tmp_path, fails=True)):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="a process elsewhere outlives its parent")
def test_a_program_does_not_outlive_who_started_it() -> None:
    script = """
import signal, subprocess, sys
from forerun.processes import bound_program
child = subprocess.Popen(bound_program(signal.SIGKILL, [sys.executable, "-S", "-c", "print(1, flush=True); input()"]),
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.kill()
    wait_for(lambda: not is_running(pid), 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process elsewhere outlives its parent")
def test_a_server_does_not_outlive_a_comparison_that_is_killed(tmp_path: Path) -> None:
    write_llama_server(tmp_path)
    script = f"""
import time
from pathlib import Path
from forerun.bench.llamacpp import server
folder = Path({str(tmp_path)!r})
given = server.ServerSettings(folder / "llama-server", folder / "m.gguf", rows=1, context=9, threads=1, on_gpu=False)
with server.started(given) as running:
    print(running.process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        pid = comparison.stdout.readline().strip()
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        comparison.kill()
    assert str(tmp_path / "llama-server").encode() in program and b"forerun.processes" not in program
    wait_for(lambda: not is_running(int(pid)), 20)


def test_a_text_that_is_too_short_is_no_measurement(tmp_path: Path) -> None:
    with server.started(settings_of(tmp_path, missing=1)) as running:
        method = server.WithLlamaServer("llama.cpp", "llama.cpp", running, 0.0, 0)
        with pytest.raises(ServerError, match="3 tokens instead of 4"):
            method.run([[1, 2]], 4)
    assert running.process.poll() is not None


class FakeLlama:
    """What of `llama_cpp.Llama` is used: every pass gives one token, with drafts three."""

    def __init__(self, path: str, **options: Any) -> None:
        self.options, self.resets = options, 0

    def reset(self) -> None:
        self.resets += 1

    def eval(self, tokens: list[int]) -> None:
        self.last = tokens

    def generate(self, tokens: list[int], **sampling: Any) -> Iterator[int]:
        while True:
            self.eval(tokens)
            yield from range(3 if self.options["draft_model"] else 1)


def test_the_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama = FakeLlama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda **options: options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    given = PeerSettings(tmp_path / "m.gguf", None, 2, 512, threads=2, on_gpu=False, temperature=0.0, seed=0)
    with BindingPeer().methods(given, BindingPeer().names(False)) as found:
        plain, lookup = found
    assert plain.refusal(1) is None and "one sequence" in str(plain.refusal(2))
    assert plain.run([[5, 6]], 6).rounds == 6 and plain.run([[5, 6]], 6).tokens == ((0,) * 6,)
    drafted = lookup.run([[5, 6]], 6)
    assert drafted.rounds == 2 and drafted.tokens == ((0, 1, 2, 0, 1, 2),)
    llama = plain.llama  # type: ignore[attr-defined]
    assert llama.resets == 2 and llama.options["n_threads"] == 2 and llama.options["n_gpu_layers"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_peaks_of_processes() -> None:
    """Not what this process held when it made them, which is far more."""
    taken = 64 << 20
    peak = peak_of_script(f"x = bytearray({taken}); x[::4096] = x[::4096]")
    assert peak is not None and taken < peak < 2 * taken
    with pytest.raises(ForerunError, match="out of luck"):
        peak_of_script("raise SystemExit('out of luck')")
    assert peak_bytes(2**30) is None
