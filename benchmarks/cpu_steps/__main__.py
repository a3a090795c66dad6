"""`python -m benchmarks.cpu_steps`: steps of a few tokens on this CPU, beside transformers and the floors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.cpu_steps.run import run
from benchmarks.cpu_steps.steps import Grid
from forerun.config import Kernels, kernels
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    grid = Grid()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_steps",
        description="Time steps of a few tokens: transformers, Forerun without and with kernels, in turns, beside what "
        "the hardware allows: bytes over measured bandwidth, operations over measured peak.",
    )
    parser.add_argument("--model", default="embedded", help="Hub name, folder, GGUF file or 'embedded'")
    parser.add_argument("--draft", help="a draft model, or the folder of a trained drafter, to measure as well")
    parser.add_argument("--kernels", choices=[each.value for each in Kernels], help="[default: $FORERUN_KERNELS]")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(grid.batches))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(grid.tokens), help="new tokens of each row")
    parser.add_argument("--past", type=int, default=grid.past, help="keys each row has in the cache")
    parser.add_argument("--repeats", type=int, default=grid.repeats)
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--plot", type=Path, help="draw the curves, too")
    chosen = parser.parse_args(arguments)
    use = kernels() if chosen.kernels is None else Kernels(chosen.kernels)
    asked = Grid(tuple(chosen.batch_sizes), tuple(chosen.tokens), chosen.past, chosen.repeats)
    words = ["python", "-m", "benchmarks.cpu_steps", *arguments]
    return measure(
        "cpu-steps", chosen.output, chosen.plot,
        lambda path, reporter: run(chosen.model, chosen.draft, asked, use, path, reporter, words),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
