"""What a measurement leaves behind: numbers, where they come from, and the tables and picture that show them.

Tables and picture are stored, so that a record is shown without the code that measured it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, InvalidArgument
from forerun.files import read_json, write_whole
from forerun.measure.plot import Figure, read_figure
from forerun.measure.provenance import Machine, Provenance
from forerun.measure.table import Table

FORMAT = 2
"""Raise it when an older reader would misunderstand a new record."""
OTHER_FILES = {
    frozenset({"draft", "temperatures"}): "`forerun train eval` wrote it; `forerun train compare FOLDER` shows it "
    "where it lies as eval.json in the drafter's folder",
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

    def text(self) -> str:
        """The JSON of the file."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({"format": FORMAT} | as_json(fields), indent=1, ensure_ascii=False) + "\n"


def load(path: Path, kind: str | None = None) -> Record:
    """A stored record, of `kind` where one is asked for; what is wrong with any other file is one clear error."""
    content = content_of(path)
    found = content.get("format")
    if found != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has record format {found!r} and this version reads {FORMAT}; measure again"
        )
    if kind is not None and content.get("kind") != kind:
        raise InvalidArgument(f"{str(path)!r} is a record of kind {content.get('kind')!r}, not of {kind!r}")
    try:
        return _record(content)
    except ForerunError:
        raise
    except Exception as error:  # values of other types come out as many kinds
        raise InvalidArgument(f"{str(path)!r} is a damaged record ({type(error).__name__}: {error})") from error


def content_of(path: Path) -> dict[str, Any]:
    """The JSON object of a record in any format."""
    content = read_json(path, "give a file that `forerun bench` wrote")
    if not isinstance(content, dict):
        raise InvalidArgument(f"{str(path)!r} has record format None and this version reads {FORMAT}; measure again")
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
    origin, figure = content["provenance"], content["figure"]
    return Record(
        kind=content["kind"],
        provenance=Provenance(**origin | {"machine": Machine(**origin["machine"])}),
        settings=content["settings"],
        rows=content["rows"],
        details=content["details"],
        tables=tuple(_table(entry) for entry in content["tables"]),
        remarks=tuple(content["remarks"]),
        headline=tuple(content["headline"]),
        figure=None if figure is None else read_figure(figure),
        complete=content["complete"],
    )


def _table(entry: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(row) for row in entry["rows"])
    return Table(entry["title"], tuple(entry["headings"]), rows, entry["last_is_total"])
