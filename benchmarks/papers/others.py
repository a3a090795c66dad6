"""Records that other commands leave, as lines of the page: `forerun bench kernels`, and trees against chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.common import markdown, sentences
from forerun.bench.kernels import record as kernel_record
from forerun.bench.kernels import report as kernel_report
from forerun.bench.kernels.plot import plot
from forerun.bench.kernels.record import KernelRecord, Measurement
from forerun.bench.records import content_of, damaged


def kernel_lines(path: Path) -> list[str]:
    record = kernel_record.read(path)
    lines: list[str] = []
    for table in kernel_report.tables(record):
        lines += [f"{table.title}:", "", *markdown(table.headings, table.rows), ""]
    remarks = [f"{line}." for line in kernel_report.remarks(record)]
    return [*lines, *_kernel_verdict(record), "", " ".join(remarks), "", *origin(content_of(path))]


def draw_kernels(path: Path, picture: Path) -> None:
    plot(kernel_record.read(path), picture)


def _kernel_verdict(record: KernelRecord) -> list[str]:
    """Against transformers where it can run at all, and against the time of reading the logits."""
    beside = [(each, each.theirs) for each in record.measurements if each.theirs is not None]
    gains = [theirs.kernels / _own(each) for each, theirs in beside]
    walls = [theirs.wall / each.ours.wall for each, theirs in beside]
    above = [_own(each) / record.floor(each.case) for each in record.measurements]
    return sentences(
        f"**Time.** Where transformers can run at all, its kernels take {_range(gains)} times as long, and its call by "
        f"the clock {_range(walls)} times; the paper's exact kernel saves 6 to 13 %, by a profiler that counts some of "
        "the baseline's operations twice.",
        f"**Bandwidth.** A verification takes {_range(above)} times as long as reading its logits once; the paper's "
        "use 9 to 63 GB/s of 2000, which is 30 to 200 times as long.",
    )


def _own(each: Measurement) -> float:
    return each.ours.kernels if each.ours.graph is None else each.ours.graph


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "-"


def tree_lines(path: Path) -> list[str]:
    content = content_of(path)
    with damaged(path):
        lines: Sequence[Mapping[str, Any]] = content["lines"]
        rows = [
            (f"{line['temperature']:g}", str(line["size"]), line["shape"], f"{line['tokens_per_call']:.2f}",
             f"{line['gain']:+.0%}")
            for line in lines
        ]  # fmt: skip
        headings = ("T", "positions drafted", "shape", "tokens a target call", "against the chain")
        return [*markdown(headings, rows), "", *_tree_verdict(lines), "", *origin(content)]


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
    """Of any record with `summary.tables`, each with title, headings and rows of text, and `summary.sentence`."""
    content = content_of(path)
    with damaged(path):
        summary: Mapping[str, Any] = content["summary"]
        lines: list[str] = []
        for table in summary["tables"]:
            lines += [f"{table['title']}:", "", *markdown(table["headings"], table["rows"]), ""]
        return [*lines, summary["sentence"], "", *origin(content)]


def origin(content: Mapping[str, Any]) -> list[str]:
    made = content["provenance"]
    machine = made["machine"]
    return [
        f"<sub>{machine['gpu'] or machine['cpu']}; commit {made['commit'] or 'unknown'}; {made['date'][:10]}.</sub>"
    ]
