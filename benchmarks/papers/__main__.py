"""python -m benchmarks.papers TABLE: measure one table, write its record and its picture."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers import make_page
from benchmarks.papers.common import Setup, picture_path, place_of, record_path
from benchmarks.papers.pairs import PAIRS
from benchmarks.papers.tables import TABLES, Table
from forerun.errors import ForerunError


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        if asked.table == "page":
            make_page.make(partial=asked.partial)
        else:
            make_table(TABLES[asked.table], asked)
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10} {table.title} (about {table.minutes:g} min)" for name, table in TABLES.items())
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Make a table or figure of a paper again on your own machine, with one command each:\n\n"
        f"{listed}\n  {'page':<10} docs/papers.md and its pictures, from the records\n\n"
        "Records go to benchmarks/results/papers, pictures to docs/papers. FORERUN_DATA names a folder with XSum,\n"
        "HumanEval, WikiText-2 and Spec-Bench; without it Forerun's own prompts are used.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("table", choices=(*TABLES, "page"), metavar="TABLE")
    found.add_argument("--pair", choices=PAIRS, default="embedded", help="models to use (default: embedded)")
    found.add_argument("--device", help="cpu or cuda (default: cpu for the embedded model, else a GPU)")
    found.add_argument("--quick", action="store_true", help="a few seconds: does it work? Its figures say nothing")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--output", type=Path, help="another file for the record; no picture is made then")
    found.add_argument("--partial", action="store_true", help="page: mark tables that have no record yet")
    return found


def make_table(table: Table, asked: argparse.Namespace) -> None:
    setup = Setup(pair=asked.pair, device=asked.device, quick=asked.quick, seed=asked.seed)
    pair = setup.pair if table.has_pair else None
    path = asked.output or record_path(table.name, pair)
    started = time.perf_counter()
    record = table.measure(setup, path)
    print("\n".join(table.render(record)))
    print(f"\n{place_of(record)}, {time.perf_counter() - started:.0f} s; record: {path}")
    if asked.output is None:
        draw(table, pair)


def draw(table: Table, pair: str | None) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed. Where it is, run: python -m benchmarks.papers page")
        return
    from benchmarks.papers.common import read

    picture = picture_path(table.name, pair)
    picture.parent.mkdir(parents=True, exist_ok=True)
    table.draw(read(record_path(table.name, pair)), picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
