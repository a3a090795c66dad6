"""One table on a terminal, in a pipe, in a narrow window and in a document."""

from __future__ import annotations

import io

import pytest

from forerun.measure.table import Table, print_tables

WIDE = Table(
    "Speeds", ("method", "tokens per second and row", "accepted of drafted tokens"),
    (("plain", "10.0", "-"), ("geometric mean", "25.0", "81%")), last_is_total=True,
)  # fmt: skip


def test_text() -> None:
    assert WIDE.text().splitlines() == [
        "Speeds",
        "method          tokens per second and row  accepted of drafted tokens",
        "--------------  -------------------------  --------------------------",
        "plain                                10.0                           -",
        "--------------  -------------------------  --------------------------",
        "geometric mean                       25.0                         81%",
    ]


def test_headings_are_broken_where_there_is_no_room() -> None:
    lines = WIDE.text(40).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split()[-1] for line in lines[1:5]] == ["of", "accepted", "drafted", "tokens"] or lines[-1].endswith(
        "81%"
    )
    assert lines[-1].split() == ["geometric", "mean", "25.0", "81%"]


def test_markdown() -> None:
    lines = WIDE.markdown().splitlines()
    assert (
        lines[0] == "**Speeds**" and lines[3] == "| --- | ---: | ---: |" and lines[-1].startswith("| geometric mean |")
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_rich_draws_on_a_terminal_alone(is_terminal: bool) -> None:
    from rich.console import Console

    out = io.StringIO()
    print_tables([WIDE], Console(file=out, width=100, force_terminal=is_terminal))
    assert ("\x1b[" in out.getvalue()) == is_terminal and "81%" in out.getvalue()


def test_an_empty_column_has_no_width() -> None:
    assert Table("T", ("", "x"), (("", "1"),)).text().splitlines() == ["T", "  x", "  -", "  1"]
    assert Table("T", ("", "x"), ()).text(width=1).splitlines() == ["T", "  x", "  -"]


def test_a_title_is_no_markup() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), force_terminal=True, width=80)
    print_tables([Table("T [/x]", ("a",), (("[/y]",),))], console)
    assert "T [/x]" in console.file.getvalue() and "[/y]" in console.file.getvalue()


FIGURES = Table("Many figures", ("method", *(f"column {i}" for i in range(12))), (("with drafts", *["12345.67"] * 12),))


def test_columns_that_find_no_room_follow_below() -> None:
    blocks = FIGURES.text(80).split("\n\n")
    assert len(blocks) == 2 and blocks[1].startswith("Many figures (continued)")
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
    assert "\n".join(blocks).count("12345.67") == 12
    assert all(block.splitlines()[-1].startswith("with drafts") for block in blocks)
    assert FIGURES.text().count("\n") == 3, "without a width all columns stand side by side"


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_is_never_too_narrow(width: int) -> None:
    from rich.console import Console

    out = io.StringIO()
    print_tables([FIGURES], Console(file=out, width=width, force_terminal=True, no_color=True))
    assert out.getvalue().count("12345.67") == 12 and out.getvalue().count("with drafts") > 1


def test_sentences_are_broken_into_lines() -> None:
    table = Table("Facts", ("what", "here"), (("first", "a sentence " * 12), ("second", "short")), last_is_text=True)
    lines = table.text(50).splitlines()
    assert max(map(len, lines)) <= 50 and lines[-1] == "second  short"
    assert lines[4].startswith("        sentence a sentence")
