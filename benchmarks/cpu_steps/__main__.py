"""`python -m benchmarks.cpu_steps`: steps of a few tokens on this CPU, beside transformers and the floors."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.command import add_outputs, make_parser, run_command
from benchmarks.cpu_steps.run import run
from benchmarks.cpu_steps.steps import NARROW, Grid
from forerun.config import Kernels, kernels
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    grid = Grid()
    parser = make_parser(
        "cpu_steps",
        "Time steps of a few tokens: transformers, Forerun without and with kernels, in turns, beside what "
        "the hardware allows: bytes over measured bandwidth, operations over measured peak.",
    )
    parser.add_argument("--model", default="embedded", help="Hub name, folder, GGUF file or 'embedded'")
    parser.add_argument("--draft", help="a draft model, or the folder of a trained drafter, to measure as well")
    parser.add_argument(
        "--narrow", nargs="+", choices=NARROW, default=[], help="also with the target's weights as stored or quantised"
    )
    parser.add_argument("--kernels", choices=[each.value for each in Kernels], help="[default: $FORERUN_KERNELS]")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(grid.batches))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(grid.tokens), help="new tokens of each row")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--past", type=int, default=grid.past, help="keys each row has in the cache")
    before.add_argument(
        "--prompts", action="store_true", help="as prompts are read: no keys before, logits of the last token alone"
    )
    parser.add_argument("--repeats", type=int, default=grid.repeats)
    add_outputs(parser, plot="the curves")
    chosen = parser.parse_args(arguments)
    use = kernels() if chosen.kernels is None else Kernels(chosen.kernels)
    past = 0 if chosen.prompts else chosen.past
    asked = Grid(tuple(chosen.batch_sizes), tuple(chosen.tokens), past, chosen.repeats, last_only=chosen.prompts)
    return run_command(
        "cpu_steps", arguments, chosen, partial(run, chosen.model, chosen.draft, chosen.narrow, asked, use)
    )


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
