"""A chat at a terminal or behind a pipe: lines, commands and refusals, whoever answers."""

from __future__ import annotations

import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from forerun.arguments import check_whole
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "tokens, acceptance and times of all answers so far",
    "/system": "set the system message to what follows, and start anew",
    "/quit": "leave (so does Ctrl-D)",
}
SOME_REFUSED = 1
"""The exit code where a piped turn got no answer; the others did."""


class Talk(ABC):
    """One conversation. Who answers, and what is remembered, is the subclass's."""

    def __init__(self, system: str | None, out: Console, err: Console) -> None:
        from forerun.cli.console import TextOut

        self.system, self.text, self.err = system, TextOut(out), err
        self.turns = self.refused = 0

    @abstractmethod
    def answer(self, question: str) -> None:
        """Write the answer to a turn."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all turns, and begin with the system message there is now."""

    @abstractmethod
    def print_statistics(self) -> None:
        """Of all answers so far."""

    def handle(self, line: str) -> bool:
        """One line of the user's; False to leave."""
        if line.startswith("/"):
            return self._run_command(line)
        if line:
            self.turns += 1
            self.answer(line)
        return True

    def run(self) -> None:
        """Until the user leaves; the exit code of a pipe tells of turns without an answer."""
        if sys.stdin.isatty():
            self.err.print("Ask away. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
        for line in _lines():
            check_whole(line, "standard input is not text: a line")
            if not self.handle(line.strip()):
                break
        if self.refused and not sys.stdin.isatty():
            raise click.exceptions.Exit(SOME_REFUSED)

    def refuse(self, reason: object, has_line: bool = False) -> None:
        """Said even where only answers are wanted: a turn without one must not look like a silent model's.

        Behind a pipe every turn has one line; `has_line` where what there was of an answer has been written.
        """
        self.refused += 1
        click.secho(f"Error: turn {self.turns}: {reason}", fg="red", err=True)
        if not self.text.is_terminal and not has_line:
            self.text.write("\n")

    def say(self, text: str) -> None:
        self.err.print(text, style="dim", markup=False)

    def _run_command(self, line: str) -> bool:
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self.reset()
            self.say("The conversation is forgotten.")
        elif command == "/system":
            self._set_system(rest.strip())
        elif command == "/stats":
            self.print_statistics()
        elif command == "/help":
            self.say("\n".join(f"{name:<9}{what}" for name, what in COMMANDS.items()))
        else:
            self._refuse_command(command)
        return True

    def _refuse_command(self, command: str) -> None:
        """Behind a pipe the line may have been meant for the model, and whoever waits for its answer is told."""
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "/help lists them."
        if sys.stdin.isatty():
            self.say(f"No command {command}. {hint}")
        else:
            self.turns += 1
            self.refuse(f"no command {command}. {hint} A line that begins with / is one.")

    def _set_system(self, text: str) -> None:
        if not text:
            self.say(f"System message: {self.system or 'as the template has it'}. Set it with /system TEXT.")
            return
        self.system = text
        self.reset()
        self.say("System message set; the conversation starts anew.")


def _lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe."""
    if not sys.stdin.isatty():
        try:
            yield next(sys.stdin, "").removeprefix("\ufeff")  # the mark that some programs begin UTF-8 with
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"standard input is not text ({error.reason})") from error
        return
    import readline  # noqa: F401  (input() then knows arrow keys and history)

    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /quit leaves)", err=True)
