"""The section of docs/models.md that is made from the records of `benchmarks.families`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.families.report import KIND
from forerun.measure.record import Record, load

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
PAGE, BEGIN, END = ROOT / "docs" / "models.md", "<!-- families -->", "<!-- end of families -->"


def section() -> list[str]:
    """Lines of Markdown: every record that there is, a line a family."""
    lines = [BEGIN, "## How fast a plain step is", ""]
    for path in sorted(RECORDS.glob("families-*.json")):
        lines += _shown(load(path, KIND), path.name)
    return [*lines, END, ""]


def _shown(record: Record, name: str) -> list[str]:
    remarks = "; ".join(remark.rstrip(".") for remark in record.remarks)
    lines = [f"`benchmarks/results/{name}`, by `python -m benchmarks.families`: {remarks}.", ""]
    picture = PAGE.with_name(name).with_suffix(".png")
    if picture.exists():
        lines += [f"![The same as bars]({picture.name})", ""]
    for table in record.tables:
        lines += [f"{table.title}:", "", _row(table.headings), "|---" * len(table.headings) + "|"]
        lines += [_row(row) for row in table.rows]
    return [*lines, ""]


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def write() -> None:
    """Put the section in the place of the old one, or at the end."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2].lstrip("\n") if rest else ""
    PAGE.write_text(before.rstrip("\n") + "\n\n" + "\n".join(section()) + after)
