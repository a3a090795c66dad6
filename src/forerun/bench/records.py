"""What a measurement leaves behind: numbers, and everything one must know to trust or repeat them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, InvalidArgument
from forerun.files import read_json, write_whole
from forerun.measure.provenance import Machine, Provenance

FORMAT = 1
"""Raise it when an older reader would misunderstand a new record."""
OTHER_FILES = {
    frozenset({"draft", "temperatures"}): "`forerun train eval` wrote it; `forerun train compare FOLDER` shows it "
    "where it lies as eval.json in the drafter's folder",
    frozenset({"what", "runs"}): "`python benchmarks/train_losses.py` in a checkout draws it",
}
"""Files one may take for records, by what they hold, and the commands that show them."""
DECODE = "decode"
"""The kind of record that compares whole generate calls."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rows of a group whose text was compared with the baseline's."""

    identical: int
    ties: int  # part where two tokens are equally likely as far as the arithmetic can tell
    different: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contender on one group of prompts, prefill included."""

    method: str
    batch: int
    category: str
    group: int
    repeat: int
    seconds: float
    prompt_tokens: int
    new_tokens: int  # all rows together
    rounds: int  # target forwards times the rows they served
    drafted: int | None  # None where the contender does not tell
    accepted: int | None
    repeated: float  # share of 4-grams that the same output already had
    agreement: Agreement | None  # None for the baseline and for sampled text
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of drafting, scoring ..., where known

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contender that cannot run at a batch size."""

    method: str
    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """A finished or interrupted comparison."""

    provenance: Provenance
    settings: Mapping[str, Any]
    titles: Mapping[str, str]  # of the methods, in the order they took turns; the first is the baseline
    complete: bool
    measurements: tuple[Measurement, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = DECODE

    @property
    def baseline(self) -> str:
        return next(iter(self.titles))


def write(record: Any, path: Path, summary: Mapping[str, Any] | None = None) -> None:
    """A dataclass of any kind of record, as JSON. `summary` is for people who read the file; readers derive it anew."""
    content = {"format": FORMAT, **asdict(record), "summary": summary or {}}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot make the folder of {str(path)!r} ({error.strerror}); name another") from error
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read(path: Path) -> Record:
    content = content_of(path)
    with damaged(path):
        return _record(content)


def content_of(path: Path) -> dict[str, Any]:
    """The JSON object of a record of any kind and of this format."""
    content = read_json(path, "give a file that `forerun bench` wrote")
    if not isinstance(content, dict):
        raise InvalidArgument(f"{str(path)!r} has record format None and this version reads {FORMAT}; measure again")
    for names, remedy in OTHER_FILES.items():
        if "format" not in content and names <= content.keys():
            raise InvalidArgument(f"{str(path)!r} is no record of a measurement: {remedy}")
    if (found := content.get("format")) != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has record format {found!r} and this version reads {FORMAT}; measure again"
        )
    return content


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """What a record lacks, in words."""
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:  # values of other types come out as many kinds
        raise InvalidArgument(f"{str(path)!r} is a damaged record ({type(error).__name__}: {error})") from error


def provenance_of(content: Mapping[str, Any]) -> Provenance:
    origin = content["provenance"]
    return Provenance(**origin | {"machine": Machine(**origin["machine"])})


def _record(content: dict[str, Any]) -> Record:
    known = {f.name: content[f.name] for f in fields(Record)}
    return Record(
        **known
        | {
            "provenance": provenance_of(content),
            "measurements": tuple(_measurement(entry) for entry in content["measurements"]),
            "refusals": tuple(Refusal(**entry) for entry in content["refusals"]),
            "notes": tuple(content["notes"]),
        }
    )


def _measurement(entry: dict[str, Any]) -> Measurement:
    agreement = entry["agreement"]
    return Measurement(**entry | {"agreement": None if agreement is None else Agreement(**agreement)})
