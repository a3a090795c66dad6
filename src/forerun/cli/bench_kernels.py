"""`forerun bench kernels`: verification from logits to tokens on a GPU, against transformers and against memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun.cli.bench import FILE
from forerun.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from forerun.bench.kernels.record import KernelRecord


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
    from forerun.bench.plot import check_plot
    from forerun.bench.records import check_writable, default_path
    from forerun.cli.bench_cpu import Bar
    from forerun.cli.console import err_console

    check_device()
    if picture is not None:
        check_plot(picture)
    output = output or default_path(prefix="kernels")
    check_writable(output)
    err = err_console()
    with Bar(err) as bar:
        record = carry_out(output, bar, ["forerun", *sys.argv[1:]], sweep)
    if not record.measurements:
        err.print("Stopped before anything was measured.")
    else:
        show_kernels(record, picture)
        err.print(f"Record: {output}", markup=False, soft_wrap=True)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


def show_kernels(record: KernelRecord, picture: Path | None) -> None:
    """Print a record, and draw it where a picture was asked for."""
    from forerun.bench.kernels.report import plot, remarks, tables
    from forerun.cli.bench import print_table
    from forerun.cli.console import out_console

    console = out_console()
    for table in tables(record):
        print_table(table, console)
    for line in remarks(record):
        console.print(line, style="dim", markup=False)
    if picture is not None:
        plot(record, picture)
