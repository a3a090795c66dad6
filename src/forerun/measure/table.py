"""One table: cells of text under headings, printed with rich on a terminal, as plain text elsewhere, or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"
"""A cell without a value."""
GAP = "  "
DRAWN_GAP, DRAWN_FRAME = 3, 4  # characters that rich puts between columns, and around all of them
NARROWEST = 20  # characters of a line of sentences


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under headings; the first column is text, the others are figures."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    last_is_total: bool = False  # the last row sums the others up
    alarming: tuple[int, ...] = ()  # places of rows that are drawn in red
    last_is_text: bool = False  # the last column holds sentences, broken into lines where there is no room

    def text(self, width: int | None = None) -> str:
        """For anything that prints characters. Where the table would be wider than `width`, headings are broken, then
        sentences, and columns that still find no room follow below."""
        blocks = [self] if width is None else self.fitted(width)
        return "\n\n".join(block._text(width) for block in blocks)

    def fitted(self, width: int, gap: int = len(GAP)) -> list[Table]:
        """The table, or where it is too wide several that repeat its first column; `gap` stands between columns."""
        widths = self.column_widths(width, gap)
        blocks: list[list[int]] = [[0]]
        for place in range(1, len(widths)):
            used = sum(widths[i] + gap for i in blocks[-1])
            if used + widths[place] > width and len(blocks[-1]) > 1 and not self.last_is_text:
                blocks.append([0])
            blocks[-1].append(place)
        return [self] if len(blocks) == 1 else [self._columns(block) for block in blocks]

    def _columns(self, places: Sequence[int]) -> Table:
        title = self.title if 1 in places else f"{self.title} (continued)"
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return replace(self, title=title, headings=tuple(self.headings[place] for place in places), rows=rows)

    def column_widths(self, width: int | None, gap: int = len(GAP)) -> list[int]:
        """Of the columns: headings on one line where there is room, else broken between words."""
        widths = [max(len(row[i]) for row in (self.headings, *self.rows)) for i in range(len(self.headings))]
        if width is None or sum(widths) + gap * (len(widths) - 1) <= width:
            return widths
        widths = [
            max((len(part) for part in (*heading.split(), *(row[i] for row in self.rows))), default=0)
            for i, heading in enumerate(self.headings)
        ]
        if self.last_is_text:
            room = width - sum(size + gap for size in widths[:-1])
            widths[-1] = min(widths[-1], max(room, NARROWEST))
        return widths

    def _text(self, width: int | None) -> str:
        widths = self.column_widths(width)
        # a column may be empty, and lines of no width are refused by textwrap
        broken = [
            textwrap.wrap(heading, max(size, 1)) or [""] for heading, size in zip(self.headings, widths, strict=True)
        ]
        tall = max(map(len, broken))
        over = [[""] * (tall - len(lines)) + lines for lines in broken]
        rule = GAP.join("-" * size for size in widths)
        shown = ["\n".join(self._lines(row, widths)) for row in self.rows]
        total = [rule] if self.last_is_total and len(shown) > 1 else []
        headings = (self._line(line, widths) for line in zip(*over, strict=True))
        return "\n".join([self.title, *headings, rule, *shown[:-1], *total, *shown[-1:]])

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        sentences = textwrap.wrap(row[-1], max(widths[-1], 1), break_on_hyphens=False) if self.last_is_text else []
        first, *rest = sentences or [row[-1]]
        blank = [""] * (len(row) - 1)
        return [self._line([*row[:-1], first], widths), *(self._line([*blank, line], widths) for line in rest)]

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        aligned = [cell.rjust(size) for cell, size in zip(cells, widths, strict=True)]
        aligned[0] = cells[0].ljust(widths[0])
        if self.last_is_text:
            aligned[-1] = cells[-1]
        return GAP.join(aligned).rstrip()

    def markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.headings[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """On a terminal drawn by rich; as plain text where the output is piped."""
    width = console.width
    for table in tables:
        if not console.is_terminal:
            console.print(table.text(width), end="\n\n", markup=False, highlight=False, soft_wrap=True)
        else:
            for block in table.fitted(width - DRAWN_FRAME, DRAWN_GAP):
                _draw(block, console)


def _draw(table: Table, console: Console) -> None:
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    title = Text(table.title, style="table.title")  # a string would be read as markup, and "[/]" is none
    drawn = Drawn(title=title, title_justify="left", box=box.SIMPLE)
    last = len(table.headings) - 1
    for place, size in enumerate(table.column_widths(console.width - DRAWN_FRAME, DRAWN_GAP)):
        is_text = place == 0 or (table.last_is_text and place == last)
        drawn.add_column(
            table.headings[place], justify="left" if is_text else "right", overflow="fold", width=max(size, 1)
        )
    for place, row in enumerate(table.rows):
        is_total = table.last_is_total and place == len(table.rows) - 1
        if is_total:
            drawn.add_section()
        drawn.add_row(*row, style="bold" if is_total else "red" if place in table.alarming else None)
    console.print(drawn, markup=False)
