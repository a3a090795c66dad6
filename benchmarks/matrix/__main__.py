"""`python -m benchmarks.matrix`: options, drafters, rules, batches and contexts against decoding without them."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.command import add_device, add_outputs, make_parser, run_command
from benchmarks.matrix.run import Settings, run
from forerun.bench.decode.pair import LARGE, SMALL
from forerun.loading.load import choose_device
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = make_parser("matrix", __doc__)
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
    add_device(parser)
    add_outputs(parser, plot="the multiples")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, chosen.draft, tuple(chosen.batch_sizes), tuple(chosen.contexts), chosen.tokens,
        max(chosen.repeats, 1), chosen.only, chosen.seconds,
    )  # fmt: skip
    return run_command("matrix", arguments, chosen, partial(run, asked, choose_device(chosen.device)))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
