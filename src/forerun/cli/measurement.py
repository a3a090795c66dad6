"""What the commands that measure have in common: a bar over all steps, a record, its tables, a picture."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from forerun.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.progress import Progress


class Measured(Protocol):
    """A record that knows whether anything is in it, and whether the run was cut short."""

    @property
    def measurements(self) -> Sequence[Any]: ...

    @property
    def complete(self) -> bool: ...


Record = TypeVar("Record", bound=Measured)


def measure(
    prefix: str,
    output: Path | None,
    picture: Path | None,
    carry_out: Callable[[Path, Bar], Record],
    show: Callable[[Record, Path | None], None],
) -> None:
    """Measure into a record, print it, and leave with a code of its own if somebody pressed Ctrl-C."""
    from forerun.cli.console import err_console
    from forerun.files import check_output
    from forerun.measure.plot import check_plot
    from forerun.measure.record import default_path

    if picture is not None:
        check_plot(picture)
    output = output or default_path(prefix=prefix)
    check_output(output)
    err = err_console()
    with Bar(err) as bar:
        record = carry_out(output, bar)
    if not record.measurements:
        err.print("Stopped before anything was measured.")
    else:
        show(record, picture)
        err.print(f"Record: {output}", markup=False, soft_wrap=True)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


def show_with(package: str) -> Callable[[Any, Path | None], None]:
    """How the records of `package` are shown: by the tables and remarks of its `report`, the picture of its `plot`."""

    def show(record: Any, picture: Path | None) -> None:
        from forerun.cli.bench import print_table
        from forerun.cli.console import out_console

        report = importlib.import_module(f"{package}.report")
        console = out_console()
        for table in report.tables(record):
            print_table(table, console)
        for line in report.remarks(record):
            console.print(line, style="dim", markup=False)
        if picture is not None:
            importlib.import_module(f"{package}.plot").plot(record, picture)

    return show


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
