"""Options made from dataclasses: name, type, default and help stand once, in the dataclass."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from forerun.cli.main import COMMANDS, LazyCommand, cli
from forerun.cli.options import GroupedCommand, in_options, options_from, settings_from
from forerun.config import ModelSettings, SpeculationSettings
from forerun.drafters.named import NAMES
from forerun.errors import InvalidArgument

WIDTH = 80


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    seed: int = 7
    """Of the random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Base):
    learning_rate: float = 6e-4
    """The highest; warm-up before,
    cosine after."""
    steps: int | None = None
    """Stop after so many."""
    share: bool = True
    """Use the target's embedding."""
    quiet: bool = False
    sizes: tuple[int, ...] = (1, 4)
    """Rows at once."""
    colour: Colour = Colour.RED
    task: Literal["write", "read"] | None = None


def parsed(*arguments: str, **changes: Any) -> Example:
    made: list[Example] = []

    @click.command(cls=GroupedCommand)
    @options_from(Example, "Learning", **changes)
    def command(**options: Any) -> None:
        made.append(settings_from(Example, options))

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return made[0]


@pytest.mark.parametrize(
    ("message", "told"),
    (
        ("learning_rate=0.0: must be > 0", "--learning-rate 0.0: must be > 0"),
        ("sizes=(1, 4): at most steps=2, colour='red'", "--sizes 1,4: at most --steps 2, --colour 'red'"),
        ("sizes=[3] and (seed=5)", "--sizes 3 and (--seed 5)"),
        ("share=False with quiet=True", "--no-share with --quiet"),
        # Not of this command, not a value of its own, or Python to be written as it stands
        ("speed=3: too fast", "speed=3: too fast"),
        ("bent:seed=3,steps=4", "bent:seed=3,steps=4"),
        ("give Example(seed=3), quiet=False, other.seed=3", "give Example(seed=3), quiet=False, other.seed=3"),
        ("add steps=, or files of the colour='red'", "add steps=, or files of the colour='red'"),
        ("'runs/seed=3/model' and http://x?seed=3&steps=4", "'runs/seed=3/model' and http://x?seed=3&steps=4"),
    ),
)
def test_errors_name_options_as_they_are_typed(message: str, told: str) -> None:
    @click.command(cls=GroupedCommand)
    @options_from(Example, "Learning")
    def command(**options: Any) -> None:
        raise InvalidArgument(message)

    assert in_options(message, command.params) == told
    with pytest.raises(InvalidArgument) as error:
        command.main([], standalone_mode=False)
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("line", "told"),
    (
        ("bench decode --device cpu --max-new-tokens 10", "Error: --max-new-tokens 10: "),
        ("bench serve http://127.0.0.1:1 --ramp 40 --seconds 30", "Error: --ramp 40.0: "),
        ("bench -m tiny --batch-sizes 0", "Error: --batch-sizes 0: "),
        ("plan --max-length 400", "Error: --max-length 400: "),
        ("serve tiny --host 0.0.0.0", "Error: --host '0.0.0.0': "),
    ),
)
def test_commands_say_which_option_is_wrong(line: str, told: str) -> None:
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code != 0 and result.stderr.startswith(told), result.stderr


def test_without_arguments_the_defaults_are_the_dataclasss() -> None:
    assert parsed() == Example()


def test_every_type_is_read() -> None:
    typed = "--seed 1 --learning-rate 0.1 --steps 3 --no-share --quiet --sizes 2,8,2 --colour blue --task read"
    want = Example(
        seed=1, learning_rate=0.1, steps=3, share=False, quiet=True, sizes=(2, 8), colour=Colour.BLUE, task="read"
    )
    assert parsed(*typed.split()) == want


def test_a_command_may_add_a_short_form() -> None:
    assert parsed("-s", "5", steps={"flags": ("--steps", "-s")}).steps == 5


@pytest.mark.parametrize("typed", [("--sizes", "a"), ("--sizes", ","), ("--colour", "green"), ("--steps", "x")])
def test_what_cannot_be_read_is_refused(typed: tuple[str, ...]) -> None:
    with pytest.raises(click.BadParameter):
        parsed(*typed)


def test_a_field_that_is_not_there_is_noticed_at_once() -> None:
    with pytest.raises(AttributeError, match="stepps"):
        options_from(Example, "Learning", "stepps")


def test_help_is_the_docstring_under_the_field() -> None:
    command = click.command(cls=GroupedCommand)(options_from(Example, "Learning")(lambda: None))
    output = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for text in ("The highest; warm-up before, cosine after. [default: 0.0006]", "Of the random numbers.",
                 "--sizes N,...", "[default: 1,4]", "--share / --no-share", "[red|blue]"):  # fmt: skip
        assert text in output


def test_library_and_command_line_have_the_same_defaults() -> None:
    parameters = {p.name: p.default for p in COMMANDS["generate"].load().params}
    for settings in (ModelSettings(), SpeculationSettings()):
        for name in settings.__slots__:
            assert parameters[name] == getattr(settings, name)


def test_the_help_of_drafters_names_each_kind() -> None:
    (option,) = (p for p in COMMANDS["generate"].load().params if p.name == "draft")
    assert isinstance(option, click.Option) and option.help is not None
    assert [name for name in NAMES if f"'{name}'" not in option.help] == []
    assert "8-bit copy" in option.help  # what `auto` may draft with on a CPU


def commands(table: dict[str, LazyCommand], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every command and of every command of a group."""
    for name, lazy in table.items():
        yield (*path, name)
        command = lazy.load()
        if isinstance(command, click.Group):
            with click.Context(command) as context:
                yield from ((*path, name, inner) for inner in command.list_commands(context))


@pytest.mark.parametrize("path", [(), *commands(COMMANDS)], ids=" ".join)
def test_help_fits_a_terminal(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*path, "--help"], terminal_width=WIDTH, prog_name="forerun")
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if len(line) > WIDTH] == []


def test_options_that_mean_the_same_have_the_same_short_form() -> None:
    """-m model, -d draft, -o output, -f file, -q quiet, -t temperature, wherever they are."""
    short: dict[str, set[str]] = {}
    for path in commands(COMMANDS):
        command: click.Command = cli
        for name in path:
            assert isinstance(command, click.Group)
            with click.Context(command) as context:
                inner = command.get_command(context, name)
            assert inner is not None
            command = inner
        for param in command.params:
            if isinstance(param, click.Option):
                shorts = {opt for opt in param.opts if not opt.startswith("--")}
                for opt in param.opts:
                    if opt in {"--model", "--draft", "--output", "--quiet"}:
                        short.setdefault(opt, set()).update(shorts or {f"none at {' '.join(path)}"})
    assert short == {"--model": {"-m"}, "--draft": {"-d"}, "--output": {"-o"}, "--quiet": {"-q"}}


def test_every_table_entry_can_be_imported() -> None:
    for lazy in COMMANDS.values():
        module, _, name = lazy.where.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_completion_knows_commands_and_options() -> None:
    from click.shell_completion import BashComplete

    complete = BashComplete(cli, {}, "forerun", "_FORERUN_COMPLETE")
    assert [item.value for item in complete.get_completions([], "gen")] == ["generate"]
    assert "--draft-top-k" in [item.value for item in complete.get_completions(["generate"], "--draft")]


@pytest.mark.parametrize(("typed", "current"), [("cuda:1", [1]), ("cuda:2", []), ("cuda", []), ("cpu", []), (None, [])])
def test_a_gpu_that_is_named_becomes_the_current_one(
    typed: str | None, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels go to the current device, and nobody can call set_device from a shell."""
    made: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", made.append)
    seen: list[str | None] = []

    @click.command(cls=GroupedCommand)
    @options_from(ModelSettings, "Model", "device")
    def command(device: str | None) -> None:
        seen.append(device)

    arguments = [] if typed is None else ["--device", typed]
    CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
    assert (seen, made) == ([typed], current)
