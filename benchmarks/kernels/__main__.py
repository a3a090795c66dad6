"""`python -m benchmarks.kernels`: verification on a GPU, from logits to tokens, against transformers and memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.kernels.run import check_device, run
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Time verification over vocabularies, batches, rules and truncations. Needs a GPU. Beside a time "
        "stand its floor, the bytes that must be read over the bandwidth of a copy in the same run, and transformers' "
        "own function in the same process (it takes one row only).",
    )
    parser.add_argument("--sweep", action="store_true", help="then try other tile sizes, one change at a time")
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--plot", type=Path, help="draw the plain cases, too")
    chosen = parser.parse_args(arguments)
    check_device()
    words = ["python", "-m", "benchmarks.kernels", *arguments]
    return measure(
        "kernels", chosen.output, chosen.plot, lambda path, reporter: run(path, reporter, words, chosen.sweep)
    )


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
