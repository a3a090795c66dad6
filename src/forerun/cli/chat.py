"""`forerun chat`: talk to a model. What was said stays in its cache, so every turn only reads what is new."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    generate_keywords,
    length_options,
    model_options,
    option,
    parallel_options,
    sampling_options,
    speculation_options,
)
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.cli.pair import Loaded
    from forerun.decoder import GenerateResult

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "tokens, acceptance and times of all answers so far",
    "/system": "set the system message to what follows, and start anew",
    "/quit": "leave (so does Ctrl-D)",
}
LEAST_ANSWER = 64  # tokens of the context kept free for an answer
SOME_REFUSED = 1
"""The exit code where a piped turn got no answer; the others did."""
WARM_UP = ((1, 2, 3, 4),)
"""Any prompt will do to compile what rounds use."""


@click.command(cls=GroupedCommand)
@option("Prompt", "--system", metavar="TEXT", show_default="the template's own", help="System message.")
@model_options
@parallel_options("Model")
@speculation_options()
@sampling_options
@length_options(max_new_tokens=512)
@option("Output", "--quiet", "-q", is_flag=True, help="Only the answers.")
def chat(**options: Any) -> None:
    """Talk to a model. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.

    From a pipe every line is a turn, and only the answers go to standard output. A turn that does not fit the model's
    context is answered by an empty line; standard error says why, and the exit code is 1.
    """
    from forerun.cli.console import err_console, note, out_console, plain_warnings
    from forerun.cli.pair import load
    from forerun.cli.prompts import uses_template

    console = err_console(options["quiet"])
    keywords = generate_keywords(options)
    with plain_warnings(console):
        loaded = load(options, console)
        uses_template(loaded.tokenizer, True, options["system"], [])
        session = Session(loaded, keywords, options["system"], out_console(), console)
        if (lossy := session.decoder.engine.lossy) is not None:
            note(console, f"{lossy}.")
        if sys.stdin.isatty():
            console.print("Ask away. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
        for line in _lines():
            if not session.hear(line.strip()):
                break
    if session.refused and not sys.stdin.isatty():
        raise click.exceptions.Exit(SOME_REFUSED)


def _lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
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


class Session:
    """One conversation at a terminal or behind a pipe."""

    def __init__(
        self, loaded: Loaded, keywords: dict[str, Any], system: str | None, out: Console, err: Console
    ) -> None:
        from forerun.cli.console import TextOut
        from forerun.cli.conversation import Conversation
        from forerun.cli.run import ready_decoder
        from forerun.engine import Stats

        self.keywords, self.err = keywords, err
        self.text = TextOut(out)
        self.decoder = ready_decoder(loaded, err, WARM_UP, keywords, keep_rows=1)
        self.turns = self.refused = 0
        self.conversation = Conversation(loaded.tokenizer, system)
        self.stats, self.seconds = Stats(), 0.0

    def hear(self, line: str) -> bool:
        """One line of the user's; False to leave."""
        if line.startswith("/"):
            return self._obey(line)
        if line:
            self._answer(line)
        return True

    def _obey(self, line: str) -> bool:
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self.conversation.reset()
            self._say("The conversation is forgotten.")
        elif command == "/system":
            self._set_system(rest.strip())
        elif command == "/stats":
            self._print_statistics()
        elif command == "/help":
            self._say("\n".join(f"{name:<9}{what}" for name, what in COMMANDS.items()))
        else:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            self._say(f"No command {command}. {f'Did you mean {near[0]}?' if near else '/help lists them.'}")
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            self._say(
                f"System message: {self.conversation.system or 'as the template has it'}. Set it with /system TEXT."
            )
            return
        self.conversation.system = text
        self.conversation.reset()
        self._say("System message set; the conversation starts anew.")

    def _answer(self, question: str) -> None:
        limit = self.decoder.engine.target.context_length
        reserve = min(self.keywords["max_new_tokens"], LEAST_ANSWER)
        self.turns += 1
        self.conversation.ask(question)
        try:
            prompt, dropped = self.conversation.fit(limit, reserve)
        except InvalidArgument as error:
            self._refuse(f"turn {self.turns}: {error}")
            return
        if dropped:
            self._say(
                f"The context of {limit} tokens is full: the oldest {dropped} turns were dropped. /reset starts anew."
            )
        self._finish(self._stream(prompt))

    def _refuse(self, reason: str) -> None:
        """Said even where only answers are wanted: a turn without one must not look like a silent model's."""
        self.refused += 1
        click.secho(f"Error: {reason}", fg="red", err=True)
        if not self.text.is_terminal:
            self.text.write("\n")

    def _stream(self, prompt: list[int]) -> GenerateResult:
        from forerun.cli.run import run, stop_on_interrupt

        with stop_on_interrupt() as stopped, self.text.streamed(self.conversation.tokenizer) as show:
            return run(self.decoder, [prompt], self.keywords, show, stopped)

    def _finish(self, done: GenerateResult) -> None:
        from forerun.cli.statistics import one_line

        row = done.rows[0]
        self.conversation.answer(row.tokens)
        self.stats, self.seconds = self.stats.plus(done.stats), self.seconds + done.seconds
        if row.error:
            self._say(row.error)
        elif self.text.is_terminal:
            self.err.print(f"{one_line(done.stats, done.seconds)}; ended by {row.finish_reason.value}", style="dim")

    def _print_statistics(self) -> None:
        from forerun.cli.console import legend
        from forerun.cli.statistics import statistics_table

        legend(self.err)
        self.err.print(statistics_table(self.stats, self.seconds))

    def _say(self, text: str) -> None:
        self.err.print(text, style="dim", markup=False)
