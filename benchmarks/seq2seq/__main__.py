"""`python -m benchmarks.seq2seq`: decoding with drafts against decoding without, encoder-decoder models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.seq2seq.pair import SHAPES
from benchmarks.seq2seq.run import Settings, run
from forerun.loading.load import choose_device
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seq2seq", description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=list(default.pairs), help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=list(default.batches), help="rows decoded together"
    )
    parser.add_argument("--alpha", type=float, default=default.alpha, help="chance that a draft token is kept")
    parser.add_argument("--draft-length", type=int, default=default.draft_length, help="tokens drafted a round")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="the median counts")
    parser.add_argument("--no-compile", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--device", help="cpu, cuda ...; a GPU where there is one")
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--plot", type=Path, help="draw milliseconds a token, too")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        tuple(chosen.pairs), tuple(chosen.batch_sizes), chosen.alpha, chosen.draft_length, chosen.tokens,
        max(chosen.repeats, 1), not chosen.no_compile,
    )  # fmt: skip

    device, words = choose_device(chosen.device), ["python", "-m", "benchmarks.seq2seq", *arguments]
    return measure(
        "seq2seq", chosen.output, chosen.plot, lambda path, reporter: run(asked, device, path, reporter, words)
    )


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
