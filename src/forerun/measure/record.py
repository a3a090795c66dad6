"""What a measurement leaves behind: numbers, where they come from, and the tables and picture that show them.

Tables and picture are stored, so that a record is shown without the code that measured it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from forerun.arguments import refuse, shown
from forerun.errors import InvalidArgument
from forerun.files import read_json, write_whole
from forerun.measure.plot import Figure, check_figure
from forerun.measure.provenance import Provenance
from forerun.measure.stored import read
from forerun.measure.table import Table

FORMAT = 2
"""Raise it when an older reader would misunderstand a new record."""
REMEDY = "give a file that `forerun bench` wrote"
NUMBER = r"(?:-?\d[-+.\deE]*|null)"
NUMBERS = re.compile(rf"\[\n\s*({NUMBER}(?:,\n\s*{NUMBER})*)\n\s*\]")
"""A list of nothing but numbers, an entry a line; strings of JSON hold no line breaks, so it is none of those."""
OTHER_FILES = {
    frozenset({"what", "runs"}): "`python benchmarks/train_losses.py` in a checkout draws it",
}
"""Files one may take for records, by what they hold, and the commands that show them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A finished or interrupted measurement of any kind."""

    kind: str
    provenance: Provenance
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()  # what was measured, one entry a call, cell or task
    details: Mapping[str, Any] = field(default_factory=dict)  # findings that are no rows, such as ceilings
    tables: tuple[Table, ...] = ()
    remarks: tuple[str, ...] = ()  # what to know before quoting the tables
    headline: tuple[str, ...] = ()  # the lines to read if one reads nothing else
    figure: Figure | None = None
    complete: bool = True  # False: interrupted, and these are the results until then

    def __post_init__(self) -> None:
        """Everything becomes what JSON gives back, so that a fresh record and a stored one are the same."""
        for name in ("settings", "rows", "details"):
            object.__setattr__(self, name, as_json(getattr(self, name)))

    def save(self, path: Path) -> None:
        """Whole or not at all; the folder is made where it is missing."""
        text = self.text()
        write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))

    def kept(self, path: Path) -> Record:
        """The record itself, saved where anything was measured."""
        if self.rows:
            self.save(path)
        return self

    def text(self) -> str:
        """The JSON of the file."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        text = json.dumps({"format": FORMAT} | as_json(fields), indent=1, ensure_ascii=False)
        return NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def load(path: Path, kind: str | None = None) -> Record:
    """A stored record, of `kind` where one is asked for; what is wrong with any other file is one clear error."""
    content = content_of(path)
    if "format" not in content:
        raise InvalidArgument(f"{str(path)!r} is no record of a measurement; {REMEDY}")
    stored_format = content["format"]
    if stored_format != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has record format {shown(stored_format)} and this version reads {FORMAT}; measure again"
        )
    if kind is not None and content.get("kind") != kind:
        raise InvalidArgument(f"{str(path)!r} is a record of kind {shown(content.get('kind'))}, not of {kind!r}")
    try:
        record = _record(content)
        record.text().encode("utf-8")  # halves of characters, and nesting without end: nobody could print or save it
    except (InvalidArgument, UnicodeEncodeError, RecursionError) as error:
        raise InvalidArgument(f"{str(path)!r} is a damaged record ({error}); measure again") from error
    return record


def content_of(path: Path) -> dict[str, Any]:
    """The JSON object of a record in any format."""
    content = read_json(path, REMEDY)
    if not isinstance(content, dict):
        raise InvalidArgument(f"{str(path)!r} is no record of a measurement; {REMEDY}")
    for names, remedy in OTHER_FILES.items():
        if "format" not in content and names <= content.keys():
            raise InvalidArgument(f"{str(path)!r} is no record of a measurement: {remedy}")
    return content


def default_path(prefix: str = "bench", now: datetime | None = None, start: Path | None = None) -> Path:
    """A fresh name in `benchmarks/results` of the checkout around `start`, or in `start` outside one."""
    start = start or Path.cwd()
    name = f"{prefix}-{(now or datetime.now()):%Y-%m-%d-%H%M%S}.json"
    for folder in (start, *start.parents):
        if (folder / "benchmarks").is_dir() and (folder / "src" / "forerun").is_dir():
            return folder / "benchmarks" / "results" / name
    return start / name


def as_json(value: Any) -> Any:
    """Dataclasses, tuples, enums and paths as JSON has them; names of objects are text."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value.name if isinstance(value, Path) else value


def _record(content: Mapping[str, Any]) -> Record:
    stored = {name: value for name, value in content.items() if name != "format"}
    for name in Record.__dataclass_fields__:  # those with defaults are for whoever measures; a file has them all
        if name not in stored:
            raise InvalidArgument(f"it lacks {name!r}")
    record: Record = read(Record, stored, "record")
    for place, table in enumerate(record.tables):
        _check_table(table, f"record.tables[{place}]")
    if record.figure is not None:
        check_figure(record.figure, "record.figure")
    return record


def _check_table(table: Table, name: str) -> None:
    if not table.headings:
        refuse(f"{name}.headings", table.headings, "must hold one at least")
    for place, row in enumerate(table.rows):
        if len(row) != len(table.headings):
            refuse(f"{name}.rows[{place}]", row, f"must hold a cell for each of {len(table.headings)} headings")
