"""`forerun bench kernels`: verification from logits to tokens on a GPU, against transformers and against memory."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forerun.cli.bench import FILE
from forerun.cli.measurement import measure, show_with


@click.command()
@click.option("--sweep", is_flag=True, help="Then try other tile sizes on some cases, one change at a time.")
@click.option("--output", type=FILE, help="The record [default: benchmarks/results of a checkout, else here].")
@click.option("--plot", "picture", type=FILE, help="Draw the plain cases, too.")
def kernels(sweep: bool, output: Path | None, picture: Path | None) -> None:
    """Time verification, from logits to tokens, over vocabularies, batches, rules and truncations. Needs a GPU.

    Beside each time stand its floor, which is the bytes that must be read over the bandwidth of a copy measured in the
    same run, and transformers' own function in the same process (it takes one row only).
    """
    from forerun.bench.kernels.run import carry_out, check_device

    check_device()
    command = ["forerun", *sys.argv[1:]]
    measure("kernels", output, picture, lambda path, bar: carry_out(path, bar, command, sweep), show_kernels)


show_kernels = show_with("forerun.bench.kernels")
