"""`python -m forerun.bench.attention`: the measurement where neither click nor rich is installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.attention.cases import BATCHES, HEADS, LENGTHS, QUERIES, all_cases, to_sweep
from forerun.bench.attention.record import AttentionRecord
from forerun.bench.attention.report import remarks, tables
from forerun.bench.attention.run import carry_out
from forerun.bench.command import measured
from forerun.bench.listening import Listener


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.attention", description="`forerun bench attention` offers more options."
    )
    parser.add_argument("--sweep", action="store_true", help="try other block sizes, stages, warps and chunks, too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where to keep the record")
    chosen = parser.parse_args(arguments)

    def measure(output: Path, listener: Listener, command: list[str]) -> AttentionRecord:
        cases = all_cases(BATCHES, QUERIES, LENGTHS, HEADS)
        swept = to_sweep(cases) if chosen.sweep else []
        return carry_out(cases, swept, max(chosen.repeats, 1), output, listener, command)

    return measured("attention", arguments, chosen.output, measure, tables, remarks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
