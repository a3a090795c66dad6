"""`python -m benchmarks.families`: plain steps of each family, fused layers against modules and transformers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.families.page import write
from benchmarks.families.run import Settings, run
from benchmarks.families.shapes import ON_CPU, ON_GPU
from forerun.loading.load import choose_device
from forerun.measure.show import main, measure


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="of these alone [default: all that are listed for the device]")
    parser.add_argument("--repeats", type=int, default=3, help="the best counts")
    parser.add_argument(
        "--methods", nargs="*", default=list(Settings(()).methods), help="beside fused layers, on a GPU"
    )
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="time prompts of so many tokens, not steps")
    parser.add_argument("--compile-only", action="store_true", help="run each once and time nothing")
    parser.add_argument("--device", help="cpu, cuda ...; a GPU where there is one")
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--add", action="store_true", help="keep what OUTPUT has of other families")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the records into docs/models.md")
    chosen = parser.parse_args(arguments)
    if chosen.page:
        write()
        return 0
    device = choose_device(chosen.device)
    families = chosen.families or (ON_GPU if device.type == "cuda" else ON_CPU)
    if chosen.add and not chosen.output:
        parser.error("--add: give the record that is to be added to by --output")
    asked = Settings(tuple(families), max(chosen.repeats, 1), tuple(chosen.methods), chosen.compile_only,
                     tuple(chosen.prompts), chosen.add)  # fmt: skip
    words = ["python", "-m", "benchmarks.families", *arguments]
    return measure("families", chosen.output, None, lambda path, reporter: run(asked, device, path, reporter, words))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
