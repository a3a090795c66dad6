"""`python -m benchmarks.narrow_gpu`: a pair of models with weights as they are, and rounded by each scheme."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.narrow_gpu.run import PAIR, WIDE, Settings, run
from forerun.math.scaled import SCHEMES
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.narrow_gpu", description=__doc__)
    parser.add_argument("schemes", nargs="*", help=f"of these alone [default: {WIDE}, {', '.join(SCHEMES)}]")
    parser.add_argument("--pair", default=PAIR, help="a synthetic pair [default: %(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="the best counts")
    parser.add_argument("--seconds", type=float, default=180.0, help="nothing begins after that many")
    parser.add_argument("--compiled", action="store_true", help="kernels are on disk already: compile nothing first")
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    chosen = parser.parse_args(arguments)
    schemes = tuple(chosen.schemes) or (WIDE, *SCHEMES)
    asked = Settings(schemes, chosen.pair, max(chosen.repeats, 1), chosen.seconds, chosen.compiled)
    words = ["python", "-m", "benchmarks.narrow_gpu", *arguments]
    return measure("narrow-gpu", chosen.output, None, lambda path, reporter: run(asked, path, reporter, words))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
