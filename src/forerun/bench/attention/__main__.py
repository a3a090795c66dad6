"""`python -m forerun.bench.attention`: the measurement where neither click nor rich is installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.attention.cases import BATCHES, HEADS, LENGTHS, QUERIES, all_cases, to_sweep
from forerun.bench.attention.report import remarks, tables
from forerun.bench.attention.run import carry_out
from forerun.bench.listening import Lines
from forerun.bench.records import check_writable, default_path
from forerun.bench.report import as_text
from forerun.errors import ForerunError

INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.attention", description="`forerun bench attention` offers more options."
    )
    parser.add_argument("--sweep", action="store_true", help="try other block sizes, stages, warps and chunks, too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where to keep the record")
    chosen = parser.parse_args(arguments)
    output = chosen.output or default_path(prefix="attention")
    command = ["python", "-m", "forerun.bench.attention", *arguments]
    try:
        check_writable(output)
        cases = all_cases(BATCHES, QUERIES, LENGTHS, HEADS)
        swept = to_sweep(cases) if chosen.sweep else []
        record = carry_out(cases, swept, max(chosen.repeats, 1), output, Lines(), command)
    except ForerunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for table in tables(record):
        print(as_text(table), end="\n\n")
    print("\n".join(remarks(record)))
    return 0 if record.complete else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
