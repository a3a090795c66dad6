"""`forerun bench cpu`: what a step of a few tokens costs on this CPU, against transformers and against the hardware."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun.cli.bench import FILE, sizes
from forerun.cli.main import INTERRUPTED
from forerun.cli.options import KERNELS, KERNELS_HELP

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from forerun.bench.cpu.record import CpuRecord


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
    from forerun.bench.plot import check_plot
    from forerun.bench.records import check_writable, default_path
    from forerun.cli.console import err_console
    from forerun.config import Kernels
    from forerun.config import kernels as setting

    if picture is not None:
        check_plot(picture)
    output = output or default_path(prefix="cpu")
    check_writable(output)
    err = err_console()
    use = setting() if kernels is None else Kernels(kernels)
    with Bar(err) as bar:
        grid = Grid(batch_sizes, tokens, past, repeats)
        record = carry_out(model, draft, grid, use, output, bar, ["forerun", *sys.argv[1:]])
    _finish(record, output, picture, err)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


def _finish(record: CpuRecord, output: Path, picture: Path | None, err: Console) -> None:
    if not record.measurements:
        err.print("Stopped before anything was measured.")
        return
    show_cpu(record, picture)
    err.print(f"Record: {output}", markup=False, soft_wrap=True)


def show_cpu(record: CpuRecord, picture: Path | None) -> None:
    """Print a record, and draw it where a picture was asked for."""
    from forerun.bench.cpu.plot import plot
    from forerun.bench.cpu.report import remarks, tables
    from forerun.cli.bench import print_table
    from forerun.cli.console import out_console

    console = out_console()
    for table in tables(record):
        print_table(table, console)
    for line in remarks(record):
        console.print(line, style="dim", markup=False)
    if picture is not None:
        plot(record, picture)


class Bar:
    """A spinner while preparing, then a bar over all steps."""

    def __init__(self, console: Console) -> None:
        from forerun.cli.console import progress_bar

        self.bar: Progress = progress_bar(console)
        self.task = self.bar.add_task("starting", total=None)

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def starting(self, what: str, total: int | None = None) -> None:
        if total is not None:
            self.bar.update(self.task, total=total, completed=0)
        self.bar.update(self.task, description=what)

    def advance(self) -> None:
        self.bar.advance(self.task)
