"""One table: cells of text under headings, printed with rich on a terminal, as plain text elsewhere, or as Markdown."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"
"""A cell without a value."""
GAP = "  "


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under headings; the first column is text, the others are figures."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    last_is_total: bool = False  # the last row sums the others up
    alarming: tuple[int, ...] = ()  # places of rows that are drawn in red

    def text(self, width: int | None = None) -> str:
        """For anything that prints characters. Headings are broken where the table would be wider than `width`."""
        widths = [max(len(row[i]) for row in (self.headings, *self.rows)) for i in range(len(self.headings))]
        if width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
            widths = [
                max((len(part) for part in (*heading.split(), *(row[i] for row in self.rows))), default=0)
                for i, heading in enumerate(self.headings)
            ]
        # a column may be empty, and lines of no width are refused by textwrap
        broken = [
            textwrap.wrap(heading, max(size, 1)) or [""] for heading, size in zip(self.headings, widths, strict=True)
        ]
        tall = max(map(len, broken))
        over = [[""] * (tall - len(lines)) + lines for lines in broken]
        rule = GAP.join("-" * size for size in widths)
        shown = [_line(row, widths) for row in self.rows]
        total = [rule] if self.last_is_total and len(shown) > 1 else []
        lines = [*(_line(line, widths) for line in zip(*over, strict=True)), rule, *shown[:-1], *total, *shown[-1:]]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.headings[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """On a terminal drawn by rich; as plain text where the output is piped, rich is missing or the table is too wide
    to be drawn without breaking words."""
    for table in tables:
        text = table.text(_width(console))
        if console is not None and console.is_terminal and max(map(len, text.splitlines())) <= console.width - 2:
            _draw(table, console)
        elif console is not None:
            console.print(text, end="\n\n", markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.write(text + "\n\n")


def _draw(table: Table, console: Console) -> None:
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    title = Text(table.title, style="table.title")  # a string would be read as markup, and "[/]" is none
    drawn = Drawn(title=title, title_justify="left", box=box.SIMPLE)
    for place, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="right" if place else "left", overflow="fold")
    for place, row in enumerate(table.rows):
        is_total = table.last_is_total and place == len(table.rows) - 1
        if is_total:
            drawn.add_section()
        drawn.add_row(*row, style="bold" if is_total else "red" if place in table.alarming else None)
    console.print(drawn, markup=False)


def _width(console: Console | None) -> int:
    return console.width if console is not None else shutil.get_terminal_size().columns


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return GAP.join([first, *(cell.rjust(size) for cell, size in zip(cells[1:], widths[1:], strict=True))]).rstrip()
