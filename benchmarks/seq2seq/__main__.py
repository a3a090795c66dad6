"""`python -m benchmarks.seq2seq`: decoding with drafts against decoding without, encoder-decoder models."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.command import add_device, add_outputs, make_parser, run_command
from benchmarks.seq2seq.pair import SHAPES
from benchmarks.seq2seq.run import Settings, run
from forerun.loading.load import choose_device
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = make_parser("seq2seq", __doc__)
    parser.add_argument("--pairs", nargs="+", default=list(default.pairs), help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=list(default.batches), help="rows decoded together"
    )
    parser.add_argument("--alpha", type=float, default=default.alpha, help="chance that a draft token is kept")
    parser.add_argument("--draft-length", type=int, default=default.draft_length, help="tokens drafted a round")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="the median counts")
    parser.add_argument("--no-compile", action="store_true", help="record no CUDA graphs")
    add_device(parser)
    add_outputs(parser, plot="milliseconds a token")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        tuple(chosen.pairs), tuple(chosen.batch_sizes), chosen.alpha, chosen.draft_length, chosen.tokens,
        max(chosen.repeats, 1), not chosen.no_compile,
    )  # fmt: skip
    return run_command("seq2seq", arguments, chosen, partial(run, asked, choose_device(chosen.device)))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
