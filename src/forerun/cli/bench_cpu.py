"""`forerun bench cpu`: what a step of a few tokens costs on this CPU, against transformers and against the hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forerun.cli.bench import FILE, sizes
from forerun.cli.measurement import measure, show_with
from forerun.cli.options import KERNELS, KERNELS_HELP


@click.command()
@click.option("--model", default="embedded", show_default=True, help="Hub name, folder, GGUF file or 'embedded'.")
@click.option("--draft", metavar="MODEL", help="A draft model, or the folder of a trained drafter, to measure as well.")
@click.option("--kernels", type=KERNELS, help=f"{KERNELS_HELP} [default: $FORERUN_KERNELS, else auto]")
@click.option("--batch-sizes", type=sizes, metavar="N,...", default="1,4,8", show_default=True)
@click.option(
    "--tokens", type=sizes, metavar="N,...", default="1,2,4,8,16", show_default=True, help="New tokens of each row."
)
@click.option(
    "--past",
    type=click.IntRange(min=1),
    metavar="N",
    default=256,
    show_default=True,
    help="Keys each row has in the cache.",
)
@click.option("--repeats", type=click.IntRange(min=1), metavar="N", default=7, show_default=True)
@click.option("--output", type=FILE, help="The record [default: benchmarks/results of a checkout, else here].")
@click.option("--plot", "picture", type=FILE, help="Draw the curves, too.")
def cpu(
    model: str,
    draft: str | None,
    kernels: str | None,
    batch_sizes: tuple[int, ...],
    tokens: tuple[int, ...],
    past: int,
    repeats: int,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Time steps of a few tokens: transformers, Forerun without and with kernels, in turns, beside the floors.

    The floors are what the hardware allows: bytes over measured bandwidth, operations over measured peak.
    """
    from forerun.bench.cpu.run import carry_out
    from forerun.bench.cpu.steps import Grid
    from forerun.config import Kernels
    from forerun.config import kernels as setting

    use = setting() if kernels is None else Kernels(kernels)
    grid = Grid(batch_sizes, tokens, past, repeats)
    command = ["forerun", *sys.argv[1:]]
    measure("cpu", output, picture, lambda path, bar: carry_out(model, draft, grid, use, path, bar, command), show_cpu)


show_cpu = show_with("forerun.bench.cpu")
