"""What is made from the records of `benchmarks.families`: a section of docs/models.md, some lines of
docs/fused-layers.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.families.report import CPU_TOKENS, KIND, family_ratios, results_of
from benchmarks.families.results import FUSED, STORED, THEIR_STORED, TRANSFORMERS
from forerun.measure.record import Record, load

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
PAGE, LAYERS = ROOT / "docs" / "models.md", ROOT / "docs" / "fused-layers.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"
OF_CPU = "families-cpu.json"


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
        lines += [*map(_row, table.rows), ""]
    return lines


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def summary() -> list[str]:
    """Lines of Markdown: how a CPU's steps compare over all families."""
    record = load(RECORDS / OF_CPU, KIND)
    results = results_of(record)
    machine = results.provenance.machine
    lines = [
        BEGIN,
        "",
        f"On a CPU ({machine.name}, {machine.cores} cores; `benchmarks/results/{OF_CPU}`), a step behind 256 keys "
        "takes of the time of transformers' float32 step of as many tokens:",
        "",
        _row(("weights", *(_tokens(count) for count in CPU_TOKENS))),
        "|---" * (1 + len(CPU_TOKENS)) + "|",
    ]
    named = {
        "float32": FUSED,
        "bfloat16, as stored": STORED,
        "transformers, bfloat16": THEIR_STORED,
    }
    for name, method in named.items():
        shares = [list(family_ratios(results, method, TRANSFORMERS, tokens).values()) for tokens in CPU_TOKENS]
        if all(shares):
            lines.append(_row((name, *map(_spread, shares))))
    return [*lines, "", END, ""]


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _spread(shares: Sequence[float]) -> str:
    return f"{min(shares):.2f} to {max(shares):.2f}, half of {len(shares)} families at most {median(shares):.2f}"


def write() -> None:
    """Put each part in the place of the old one, or at the end."""
    for page, lines in ((PAGE, section()), (LAYERS, summary())):
        text = page.read_text()
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2].lstrip("\n") if rest else ""
        between = "\n" if after else ""
        page.write_text(before.rstrip("\n") + "\n\n" + "\n".join(lines) + between + after)
