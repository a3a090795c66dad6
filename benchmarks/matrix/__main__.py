"""`python -m benchmarks.matrix`: options, drafters, rules, batches and contexts against decoding without them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.matrix.run import Settings, run
from forerun.bench.decode.pair import LARGE, SMALL
from forerun.loading.load import choose_device
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix", description=__doc__)
    parser.add_argument("--model", help=f"a target, or a pair [default: {LARGE} on a GPU, {SMALL} elsewhere]")
    parser.add_argument("--draft", help="its draft model, where --model is no pair")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=list(default.batches), help="rows decoded together"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=list(default.contexts), help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="the median counts")
    parser.add_argument("--only", default=default.only, help="cells whose name holds this text, and what they need")
    parser.add_argument("--seconds", type=float, help="begin no cell later than this")
    parser.add_argument("--device", help="cpu, cuda ...; a GPU where there is one")
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--plot", type=Path, help="draw the multiples, too")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, chosen.draft, tuple(chosen.batch_sizes), tuple(chosen.contexts), chosen.tokens,
        max(chosen.repeats, 1), chosen.only, chosen.seconds,
    )  # fmt: skip

    device, words = choose_device(chosen.device), ["python", "-m", "benchmarks.matrix", *arguments]
    return measure(
        "matrix", chosen.output, chosen.plot, lambda path, reporter: run(asked, device, path, reporter, words)
    )


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
