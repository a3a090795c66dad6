"""Records that other commands leave, as lines of the page: `python -m benchmarks.kernels`, and trees against chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.results import KIND as KERNELS
from benchmarks.papers.common import markdown, sentences
from forerun.measure.plot import draw
from forerun.measure.record import Record, load


def kernel_lines(path: Path) -> list[str]:
    record = load(path, KERNELS)
    remarks = " ".join(f"{line}." for line in record.remarks)
    return [*_table_lines(record), *_kernel_verdict(record), "", remarks, "", *origin(record)]


def draw_kernels(path: Path, picture: Path) -> None:
    figure = load(path, KERNELS).figure
    assert figure is not None
    draw(figure, picture)


def _table_lines(record: Record) -> list[str]:
    lines: list[str] = []
    for table in record.tables:
        lines += [f"{table.title}:", "", *markdown(table.headings, table.rows), ""]
    return lines


def _kernel_verdict(record: Record) -> list[str]:
    """Against transformers where it can run at all, and against the time of reading the logits."""
    beside = [row for row in record.rows if row["theirs"] is not None]
    gains = [row["theirs"]["kernels"] / _own(row) for row in beside]
    walls = [row["theirs"]["wall"] / row["ours"]["wall"] for row in beside]
    above = [_own(row) / row["floor"] for row in record.rows]
    return sentences(
        f"**Time.** Where transformers can run at all, its kernels take {_range(gains)} times as long, and its call by "
        f"the clock {_range(walls)} times; the paper's exact kernel saves 6 to 13 %, by a profiler that counts some of "
        "the baseline's operations twice.",
        f"**Bandwidth.** A verification takes {_range(above)} times as long as reading its logits once; the paper's "
        "use 9 to 63 GB/s of 2000, which is 30 to 200 times as long.",
    )


def _own(row: Mapping[str, Any]) -> float:
    ours = row["ours"]
    return float(ours["kernels"] if ours["graph"] is None else ours["graph"])


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "-"


def tree_lines(path: Path) -> list[str]:
    record = load(path, "trees")
    rows = [
        (f"{line['temperature']:g}", str(line["size"]), line["shape"], f"{line['tokens_per_call']:.2f}",
         f"{line['gain']:+.0%}")
        for line in record.rows
    ]  # fmt: skip
    headings = ("T", "positions drafted", "shape", "tokens a target call", "against the chain")
    return [*markdown(headings, rows), "", *_tree_verdict(record.rows), "", *origin(record)]


def _tree_verdict(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    best = {
        t: max((line for line in lines if line["temperature"] == t and line["shape"] != "chain"), key=_gain)
        for t in dict.fromkeys(line["temperature"] for line in lines)
    }
    shown = "; ".join(f"{_gain(line):+.0%} at T = {t:g} ({line['size']} positions)" for t, line in best.items())
    reached = [t for t, line in best.items() if _gain(line) >= 0.1]
    return sentences(
        "The paper's siblings buy acceptance and no speed, because nobody drafted on from them. Expanded to a tree and "
        "verified without loss, they give tokens: against a chain of as many positions, at best "
        f"{shown} a target call.",
        "" if len(reached) == len(best) else "Where that is little, the chain's own next token was the better guess.",
    )


def _gain(line: Mapping[str, Any]) -> float:
    return float(line["gain"])


def tables_of(path: Path) -> list[str]:
    """Of any record: its tables, and its headline."""
    record = load(path)
    return [*_table_lines(record), *record.headline, "", *origin(record)]


def origin(record: Record) -> list[str]:
    provenance = record.provenance
    return [f"<sub>{provenance.machine.name}; commit {provenance.commit or 'unknown'}; {provenance.date[:10]}.</sub>"]
