"""`python -m benchmarks.families`: plain steps of each family, fused layers against modules and transformers.

On a CPU also from a file of bfloat16, weights as `forerun.load` keeps them, beside transformers in bfloat16.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.command import add_device, add_outputs, make_parser, run_command
from benchmarks.families.page import write
from benchmarks.families.run import Settings, missing, run
from benchmarks.families.shapes import ON_CPU, ON_GPU
from forerun.loading.load import choose_device
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    parser = make_parser("families", __doc__)
    parser.add_argument("families", nargs="*", help="of these alone [default: all that are listed for the device]")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="the best counts; of decoding pairs of calls, at least five on a GPU, whose median counts",
    )
    parser.add_argument(
        "--methods", nargs="*", default=list(Settings(()).methods), help="beside fused layers, on a GPU"
    )
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="time prompts of so many tokens, not steps")
    parser.add_argument(
        "--first-calls", action="store_true", help="time the first call of two new processes each, not steps"
    )
    parser.add_argument("--compile-only", action="store_true", help="run each once and time nothing")
    add_device(parser)
    add_outputs(parser, plot="steps and prompts beside what they are held against")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what OUTPUT has of other families; without names, measure those that it lacks",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="measure nothing; write the records into docs/models.md, docs/fused-layers.md",
    )
    chosen = parser.parse_args(arguments)
    if chosen.page:
        write()
        return 0
    device = choose_device(chosen.device)
    if chosen.add and not chosen.output:
        parser.error("--add: give the record that is to be added to by --output")
    listed = ON_GPU if device.type == "cuda" else ON_CPU
    families = chosen.families or missing(listed, chosen.output if chosen.add else None, chosen.prompts)
    if not families:
        parser.error(f"--add: {chosen.output} has all families; name those that are to be measured anew")
    asked = Settings(tuple(families), max(chosen.repeats, 1), tuple(chosen.methods), chosen.compile_only,
                     tuple(chosen.prompts), chosen.first_calls, chosen.add)  # fmt: skip
    return run_command("families", arguments, chosen, partial(run, asked, device))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
