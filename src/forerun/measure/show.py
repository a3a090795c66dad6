"""A command that measures, from its first check to its exit status; and a record on the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config import rank_and_size
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import check_output
from forerun.measure.plot import check_plot, draw
from forerun.measure.progress import Bar, Reporter
from forerun.measure.record import Record, default_path
from forerun.measure.table import print_tables

if TYPE_CHECKING:
    from rich.console import Console

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130
"""Exit statuses."""


def measure(name: str, output: Path | None, picture: Path | None, run: Callable[[Path, Reporter], Record]) -> int:
    """Run a measurement that saves itself at the path it is given; print it, draw it, and return the exit status.

    Whatever can be refused before measuring is refused: `ForerunError`.
    """
    if picture is not None:
        check_plot(picture)
    output = output or default_path(name)
    check_output(output)
    with Bar(_console(stderr=True)) as reporter:
        record = run(output, reporter)
    if not record.tables:
        reporter.say("\n".join(["Stopped before anything was measured.", *record.remarks]))
    else:
        present(record, reporter.say, output, picture)
    return INTERRUPTED if not record.complete else 0 if record.tables else FAILED


def present(
    record: Record, say: Callable[[str], object], output: Path | None, picture: Path | None, form: str = "table"
) -> None:
    """Print a record, say where it was saved, draw its picture; tables first, since those numbers took long."""
    show_as(record, form)
    if output is not None:
        say(f"Record: {output}")
    if picture is not None:
        _draw_picture(record, picture)
        say(f"Picture: {picture}")


def main(run: Callable[[], int]) -> int:
    """The exit status of a command without click: errors that name their remedy are printed, not raised."""
    try:
        return run()
    except ForerunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return MISTAKEN


def show(record: Record, picture: Path | None = None) -> None:
    """Tables, then what to know of them, last what to read if one reads nothing else.

    The picture comes before them all: where it cannot be drawn, nothing is printed.
    """
    if picture is not None:
        _draw_picture(record, picture)
    console = _console()
    print_tables(record.tables, console)
    for lines, style in ((record.remarks, "dim"), (record.headline, "bold")):
        for line in lines:
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show_as(record: Record, form: str) -> None:
    """On standard output as "table", "markdown" (the tables alone) or "json" (all of it)."""
    if form == "json":
        sys.stdout.write(record.text())
    elif form == "markdown":
        sys.stdout.write("\n\n".join(table.markdown() for table in record.tables) + "\n")
    else:
        show(record)


def _draw_picture(record: Record, picture: Path) -> None:
    check_plot(picture)
    if record.figure is None:
        raise InvalidArgument(f"a record of kind {record.kind!r} holds no picture: leave --plot out")
    draw(record.figure, picture)


def _console(stderr: bool = False) -> Console:
    """Of several ranks, only 0 writes."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, quiet=rank_and_size()[0] > 0)
