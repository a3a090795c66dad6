"""`python -m benchmarks.kernels`: verification on a GPU, from logits to tokens, against transformers and memory."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.command import add_outputs, make_parser, run_command
from benchmarks.kernels.run import check_device, run
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    parser = make_parser(
        "kernels",
        "Time verification over vocabularies, batches, rules and truncations. Needs a GPU. Beside a time "
        "stand its floor, the bytes that must be read over the bandwidth of a copy in the same run, and transformers' "
        "own function in the same process (it takes one row only).",
    )
    parser.add_argument("--sweep", action="store_true", help="then try other tile sizes, one change at a time")
    add_outputs(parser, plot="the plain cases")
    chosen = parser.parse_args(arguments)
    check_device()
    return run_command("kernels", arguments, chosen, partial(run, sweep=chosen.sweep))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
