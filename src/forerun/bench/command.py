"""The end of a `python -m forerun.bench.NAME`: measure, print, and say by the exit status how it went."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from forerun.bench.listening import Lines, Listener
from forerun.errors import ForerunError
from forerun.files import check_output
from forerun.measure.record import default_path
from forerun.measure.table import Table

MISTAKEN, INTERRUPTED = 2, 130


class Record(Protocol):
    """What is left of a run, whole or not."""

    @property
    def complete(self) -> bool: ...


R = TypeVar("R", bound=Record)


def measured(
    name: str,
    arguments: Sequence[str],
    output: Path | None,
    measure: Callable[[Path, Listener, list[str]], R],
    tables: Callable[[R], Iterable[Table]],
    remarks: Callable[[R], Iterable[str]],
) -> int:
    """`measure` is given where the record goes, who hears of its progress, and the command that the record names."""
    place = output or default_path(prefix=name)
    try:
        check_output(place)
        record = measure(place, Lines(), ["python", "-m", f"forerun.bench.{name}", *arguments])
    except ForerunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return MISTAKEN
    for table in tables(record):
        print(table.text(), end="\n\n")
    print("\n".join(remarks(record)))
    return 0 if record.complete else INTERRUPTED
