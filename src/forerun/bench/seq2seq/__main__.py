"""`python -m forerun.bench.seq2seq`: decoding with drafts against decoding without, encoder-decoder models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.command import measured
from forerun.bench.listening import Listener
from forerun.bench.seq2seq.pair import SHAPES
from forerun.bench.seq2seq.record import Seq2SeqRecord
from forerun.bench.seq2seq.report import remarks, tables
from forerun.bench.seq2seq.run import Settings, carry_out
from forerun.loading.load import choose_device


def main(arguments: list[str]) -> int:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.seq2seq", description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=list(default.pairs), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", nargs="+", type=int, default=list(default.batches), help="rows decoded together")
    parser.add_argument("--alpha", type=float, default=default.alpha, help="chance that a draft token is kept")
    parser.add_argument("--draft-length", type=int, default=default.draft_length, help="tokens drafted a round")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="the median counts")
    parser.add_argument("--no-compile", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--device", help="cpu, cuda ...; a GPU where there is one")
    parser.add_argument("--output", type=Path, help="where to keep the record")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        tuple(chosen.pairs), tuple(chosen.batches), chosen.alpha, chosen.draft_length, chosen.tokens,
        max(chosen.repeats, 1), not chosen.no_compile,
    )  # fmt: skip

    def measure(output: Path, listener: Listener, command: list[str]) -> Seq2SeqRecord:
        return carry_out(asked, choose_device(chosen.device), output, listener, command)

    return measured("seq2seq", arguments, chosen.output, measure, tables, remarks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
