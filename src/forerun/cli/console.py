"""Where things are printed: text that was asked for goes to stdout, everything about it to stderr."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from forerun.config import rank_and_size

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.engine import Progress
    from forerun.types import Origin

COLOURS = {"accepted": "green", "correction": "yellow", "bonus": "blue"}  # a plain token has none
MEANINGS = {
    "accepted": "drafted and accepted",
    "correction": "the target's correction",
    "bonus": "one more after a whole draft",
}

SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "␡"}
SHOWN |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
"""Control characters, of which some terminals obey those above 0x80 as well, and what is shown for them."""


def out_console() -> Console:
    """stdout; rich finds out whether it is a terminal and whether NO_COLOR is set. Of several ranks, only 0 writes."""
    from rich.console import Console

    return Console(highlight=False, quiet=rank_and_size()[0] > 0)


def err_console(quiet: bool = False) -> Console:
    """stderr, silent on demand."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, quiet=quiet or rank_and_size()[0] > 0)


class TextOut:
    """Writes generated text, coloured by origin on a terminal, byte for byte as it is elsewhere."""

    def __init__(self, console: Console) -> None:
        self.is_terminal = console.is_terminal
        self.colour = console.is_terminal and not console.no_color

    def write(self, text: str, origin: Origin | None = None) -> None:
        """The text of one token, or text of our own, which has no origin."""
        if self.is_terminal:
            text = text.translate(SHOWN)  # a model must not steer the terminal
        if self.colour and origin in COLOURS:
            text = click.style(text, fg=COLOURS[origin])
        click.echo(text, nl=False, color=self.is_terminal)

    @contextmanager
    def streamed(self, tokenizer: Any) -> Iterator[Callable[[Progress], None]]:
        """For `run`: writes what a single row gains as it comes, and a line's end after it."""
        from forerun.text import StreamDecoder

        text = StreamDecoder(tokenizer)

        def show(progress: Progress) -> None:
            for token, origin in zip(progress.tokens, progress.origins, strict=True):
                self.write(text.push(token), origin)

        try:
            yield show
        finally:
            self.write(text.finish() + "\n")


def legend(console: Console) -> None:
    """What the colours mean, where there are any."""
    if console.is_terminal and not console.no_color:
        shown = "  ".join(f"[{colour}]■ {MEANINGS[name]}[/]" for name, colour in COLOURS.items())
        console.print(shown)


@contextmanager
def busy(console: Console, what: str) -> Iterator[None]:
    """A spinner while something takes its time."""
    if not console.is_terminal:
        yield
        return
    from rich.text import Text

    with console.status(Text(what)):  # a folder's name may hold what rich takes for a colour
        yield


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line as it is, whatever it holds and however wide the terminal is: names of files are to be copied whole."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """A line the user should know of."""
    say(console, f"Note: {text}", style="yellow")


@contextmanager
def plain_warnings(console: Console) -> Iterator[None]:
    """Warnings as one line, without the place in our code they come from."""

    def show(message: Warning | str, *where: Any) -> None:
        note(console, str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
