"""python -m benchmarks.papers TABLE: measure one table, write its record and its picture."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers import make_page
from benchmarks.papers.common import ROOT, Setup, picture_path, place_of, read, record_path
from benchmarks.papers.pairs import OWN, PAIRS, Pair, open_pair
from benchmarks.papers.tables import TABLES, Table
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import check_output
from forerun.measure import plot
from forerun.measure.record import default_path


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
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Make tables and figures of the papers again on your own machine:\n\n"
        f"{listed}\n  {'page':<10} docs/papers.md and its pictures, from the records\n\n"
        "A record goes to a new file in benchmarks/results, its picture beside it; --update replaces those that the\n"
        "page shows. FORERUN_DATA names a folder with XSum, HumanEval, WikiText-2 and Spec-Bench; else Forerun's\n"
        "own prompts are used.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*TABLES, "page")
    options.add_argument("tables", choices=names, metavar="TABLE", nargs="+", help="one or more, made in this order")
    options.add_argument("--pair", choices=PAIRS, default="embedded", help="models to use (default: embedded)")
    options.add_argument("--target", "-m", help="a model of your own instead: Hub name, folder or .gguf file")
    options.add_argument("--draft", "-d", help="a draft model for --target; without one, lookup and n-grams draft")
    options.add_argument("--device", help="cpu or cuda (default: cpu for the embedded model, else a GPU)")
    options.add_argument("--quick", action="store_true", help="does it work? A minute, and its figures say nothing")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, help="this file for the record of a single table, without a picture")
    options.add_argument("--update", action="store_true", help="replace the record and the picture that the page shows")
    options.add_argument("--partial", action="store_true", help="page: mark tables that have no record yet")
    return options


def make_tables(asked: argparse.Namespace) -> None:
    """All that were asked for, on one pair of models."""
    if asked.output is not None and len(asked.tables) > 1:
        raise InvalidArgument(f"--output takes the record of one table, and {len(asked.tables)} were asked for")
    if asked.draft is not None and asked.target is None:
        raise InvalidArgument(f"--draft {asked.draft} drafts for a model of your own: name it with --target")
    if asked.update and (asked.output is not None or asked.target is not None):
        raise InvalidArgument("--update replaces a record of the page: leave --output and --target out")
    pair_name = asked.pair if asked.target is None else OWN
    setup = Setup(pair_name, asked.target, asked.draft, asked.device, asked.quick, asked.seed)
    pair: Pair | None = None
    for name in asked.tables:
        if name == "page":
            make_page.make(partial=asked.partial)
            continue
        if TABLES[name].has_pair and pair is None:
            pair = open_pair(setup)
        make_table(TABLES[name], setup, pair, asked.output, asked.update)


def make_table(table: Table, setup: Setup, pair: Pair | None, output: Path | None, update: bool) -> None:
    models = setup.pair if table.has_pair else None
    path = output or (record_path(table.name, models) if update else new_path(table.name, models))
    check_output(path)
    started = time.perf_counter()
    record = table.measure(setup, path, pair)
    print("\n".join(table.render(record)))
    print(f"\n{place_of(record)}, {time.perf_counter() - started:.0f} s; record: {path}", flush=True)
    if output is None:
        draw(table, path, picture_path(table.name, models) if update else path.with_suffix(".png"))


def new_path(table: str, pair: str | None) -> Path:
    return default_path(record_path(table, pair).stem, start=ROOT)


def draw(table: Table, record: Path, picture: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed. Where it is, run: python -m benchmarks.papers page")
        return
    plot.draw(table.figure(read(record)), picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
