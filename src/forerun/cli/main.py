"""The `forerun` command itself: the table of sub-commands, and what an error looks like on a terminal.

Nothing heavy is imported here: `forerun --help` has to answer at once.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import click

from forerun.config import rank_and_size
from forerun.errors import ForerunError, InvalidArgument
from forerun.version import __version__


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A sub-command that is imported when it is called."""

    where: str  # "module:attribute"
    help: str

    def load(self) -> click.Command:
        module, _, name = self.where.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command), self.where
        return command


COMMANDS = {
    "generate": LazyCommand("forerun.cli.generate:generate", "Continue a prompt, faster; --compare shows how much."),
    "chat": LazyCommand("forerun.cli.chat:chat", "Talk to a model."),
    "serve": LazyCommand("forerun.cli.serve:serve", "Serve a model to OpenAI's clients over HTTP."),
    "transcribe": LazyCommand("forerun.cli.transcribe:transcribe", "Write down speech, as text or subtitles."),
    "check": LazyCommand("forerun.cli.check:check", "Test that a target and a drafter give exactly the target's text."),
    "plan": LazyCommand("forerun.cli.plan:plan", "Which drafter, drafts how long, how fast? Predicted and checked."),
    "bench": LazyCommand("forerun.cli.bench:bench", "Measure speed against plain decoding and keep the record."),
    "eval": LazyCommand("forerun.cli.eval:evaluate", "Score tasks with plain and speculative decoding, side by side."),
    "train": LazyCommand("forerun.cli.train:train", "Make a drafter: write its data, train it, count n-grams."),
    "export": LazyCommand("forerun.cli.export:export", "Make a trained draft a model of its own."),
    "doctor": LazyCommand("forerun.cli.doctor:doctor", "Say what is installed and what will be used."),
}
UNDER_TORCHRUN = ("generate", "chat", "serve", "check", "plan", "bench", "eval", "train")
"""Commands that several processes may run: they split the target, or train together."""
INTERRUPTED = 130
"""The exit code shells give to a program stopped by Ctrl-C."""


class UserError(click.ClickException):
    """An error the user can do something about: one red line, no traceback."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        if rank_and_size()[0] > 0:  # rank 0 says the same
            return
        click.echo(
            click.style("Error: ", fg="red", bold=True) + click.style(self.message, fg="red"), file=file, err=True
        )


class LazyGroup(click.Group):
    """A group that knows its commands' names and help without importing them."""

    table: ClassVar[Mapping[str, LazyCommand]] = {}
    title: ClassVar[str] = "forerun"
    several: ClassVar[tuple[str, ...]] = ()
    """Commands that several processes may run; of any other each process would run the whole."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.table[cmd_name].load() if cmd_name in self.table else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self.table.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}.{_suggest(name, list(self.table))}", ctx=ctx)
        called, command, rest = super().resolve_command(ctx, args)
        size = rank_and_size()[1]
        if size > 1 and called not in self.several:
            others = ", ".join(f"{self.title} {other}" for other in self.several)
            raise InvalidArgument(
                f"torchrun has started {size} processes, and `{self.title} {called}` runs in one: start it without"
                + (f"; those that use several are {others}" if others else "")
            )
        return called, command, rest


class ForerunGroup(LazyGroup):
    """The command itself, where errors become one line."""

    table = COMMANDS
    several = UNDER_TORCHRUN

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            if ctx.params["debug"]:
                raise
            raise UserError(str(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run, then write out what is still held back: here a full disk can be told, at Python's end it cannot."""
        try:
            try:
                return super().main(*arguments, **options)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if isinstance(error, ForerunError) or "--debug" in sys.argv[1:2]:
                raise
            _give_up_stdout()
            if error.errno == errno.EPIPE:  # whoever read it has gone, and wants to hear nothing
                sys.exit(1)
            with suppress(OSError):  # standard error may be as full
                UserError(_in_words(error)).show()
            sys.exit(UserError.exit_code)


def _in_words(error: OSError) -> str:
    """An error of the system's, which knows a file's name if one was opened and none if one was written to."""
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        return f"standard output cannot be written: {reason}; make room, or send it elsewhere"
    return f"{reason}: {error.filename!r}; choose another place" if error.filename is not None else reason


def _give_up_stdout() -> None:
    """Python flushes standard output once more when it ends, and would complain again."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."


COMPLETION = 'Tab completion in bash: eval "$(_FORERUN_COMPLETE=bash_source forerun)"'


@click.group(cls=ForerunGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=COMPLETION)
@click.version_option(__version__, prog_name="forerun")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Forerun makes language models answer faster without changing what they say."""


def main() -> None:
    """Entry point of the `forerun` command."""
    _wait_briefly()
    cli(prog_name="forerun")


def _wait_briefly() -> None:
    """Let OpenMP's threads spin for microseconds, not milliseconds, before they sleep, unless the user has spoken.

    torch and Numba bring a pool each, and other processes want their turn: threads that spin for work that is not
    theirs take the cores from those that have some. Has to be said before torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"
