"""`python -m forerun.bench`: the comparison where neither click nor rich is installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.compare import check, load_and_run
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m forerun.bench", description="`forerun bench` offers more options.")
    parser.add_argument("--model", default="embedded", help="Hub name, folder, GGUF file or 'embedded'")
    parser.add_argument("--data", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--output", type=Path, help="where to keep the record")
    parser.add_argument("--quick", action="store_true", help="few prompts, about two minutes")
    chosen = parser.parse_args(arguments)
    asked = check(model=chosen.model, data=chosen.data, quick=chosen.quick)
    words = ["python", "-m", "forerun.bench", *arguments]
    return measure("bench", chosen.output, None, lambda path, reporter: load_and_run(asked, path, reporter, words))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
