"""`python -m forerun.bench.decode [--quick] [--output RECORD]`: the measurement without click and rich."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.command import measured
from forerun.bench.decode.plan import make_plan
from forerun.bench.decode.record import DecodeRecord
from forerun.bench.decode.report import remarks, tables
from forerun.bench.decode.run import carry_out
from forerun.bench.listening import Listener


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

    def measure(output: Path, listener: Listener, command: list[str]) -> DecodeRecord:
        plan = make_plan(chosen.model, chosen.draft, quick=chosen.quick, most_seconds=chosen.seconds)
        return carry_out(plan, output, listener, command)

    return measured("decode", arguments, chosen.output, measure, tables, remarks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
