"""python -m benchmarks.papers TABLE: measure one table, write its record and its picture."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers import make_page
from benchmarks.papers.common import Setup, picture_path, place_of, read, record_path
from benchmarks.papers.pairs import PAIRS, Pair, open_pair
from benchmarks.papers.tables import TABLES, Table
from forerun.errors import ForerunError, InvalidArgument


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        make_tables(asked)
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10} {table.title} (about {table.minutes:g} min)" for name, table in TABLES.items())
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Make tables and figures of the papers again on your own machine:\n\n"
        f"{listed}\n  {'page':<10} docs/papers.md and its pictures, from the records\n\n"
        "Records go to benchmarks/results/papers, pictures to docs/papers. FORERUN_DATA names a folder with XSum,\n"
        "HumanEval, WikiText-2 and Spec-Bench; without it Forerun's own prompts are used.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*TABLES, "page")
    found.add_argument("tables", choices=names, metavar="TABLE", nargs="+", help="one or more, made in this order")
    found.add_argument("--pair", choices=PAIRS, default="embedded", help="models to use (default: embedded)")
    found.add_argument("--device", help="cpu or cuda (default: cpu for the embedded model, else a GPU)")
    found.add_argument("--quick", action="store_true", help="does it work? A minute, and its figures say nothing")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--output", type=Path, help="another file for the record of a single table, without a picture")
    found.add_argument("--partial", action="store_true", help="page: mark tables that have no record yet")
    return found


def make_tables(asked: argparse.Namespace) -> None:
    """All that were asked for, on one pair of models."""
    if asked.output is not None and len(asked.tables) > 1:
        raise InvalidArgument(f"--output takes the record of one table, and {len(asked.tables)} were asked for")
    setup = Setup(pair=asked.pair, device=asked.device, quick=asked.quick, seed=asked.seed)
    pair: Pair | None = None
    for name in asked.tables:
        if name == "page":
            make_page.make(partial=asked.partial)
            continue
        if TABLES[name].has_pair and pair is None:
            pair = open_pair(setup)
        make_table(TABLES[name], setup, pair, asked.output)


def make_table(table: Table, setup: Setup, pair: Pair | None, output: Path | None) -> None:
    models = setup.pair if table.has_pair else None
    path = output or record_path(table.name, models)
    started = time.perf_counter()
    record = table.measure(setup, path, pair)
    print("\n".join(table.render(record)))
    print(f"\n{place_of(record)}, {time.perf_counter() - started:.0f} s; record: {path}", flush=True)
    if output is None:
        draw(table, models)


def draw(table: Table, pair: str | None) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed. Where it is, run: python -m benchmarks.papers page")
        return
    picture = picture_path(table.name, pair)
    picture.parent.mkdir(parents=True, exist_ok=True)
    table.draw(read(record_path(table.name, pair)), picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
