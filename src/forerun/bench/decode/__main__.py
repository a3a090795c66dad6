"""`python -m forerun.bench.decode [--quick] [--output RECORD]`: the measurement without click and rich."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.decode.plan import make_plan
from forerun.bench.decode.report import remarks, tables
from forerun.bench.decode.run import carry_out
from forerun.bench.listening import Lines
from forerun.bench.records import check_writable, default_path
from forerun.bench.report import as_text
from forerun.errors import ForerunError

INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.decode", description="`forerun bench decode` offers more options."
    )
    parser.add_argument("--model", help="a synthetic pair, or a target together with --draft")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--seconds", type=float, help="begin no part later than that [default: 150]")
    parser.add_argument("--quick", action="store_true", help="two batch sizes, short texts")
    parser.add_argument("--output", type=Path, help="where to keep the record")
    chosen = parser.parse_args(arguments)
    output = chosen.output or default_path(prefix="decode")
    try:
        check_writable(output)
        plan = make_plan(chosen.model, chosen.draft, quick=chosen.quick, most_seconds=chosen.seconds)
        record = carry_out(plan, output, Lines(), ["python", "-m", "forerun.bench.decode", *arguments])
    except ForerunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for table in tables(record):
        print(as_text(table), end="\n\n")
    print("\n".join(remarks(record)))
    return 0 if record.complete else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
