"""What a task is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.eval.sandbox.run import ProgramLimits


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of one answer; a task's score is its mean over examples."""

    name: str
    title: str
    is_share: bool = True  # between 0 and 1, shown as percent


@dataclass(frozen=True, slots=True)
class Example:
    """One thing to ask."""

    id: str
    text: str  # the document, question or code to go on from
    reference: Any  # whatever the task's scorer needs
    category: str = ""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One sequence that a decoder answered; its scores once it is scored."""

    text: str
    tokens: tuple[int, ...]
    finish: str = ""
    seconds: float = 0.0  # from the beginning of the call to the end of this sequence
    mean_logprob: float | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)  # by metric
    note: str = ""  # of the scorer


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of one answer, by metric."""

    values: Mapping[str, float]
    note: str = ""  # why a program failed, which number was found


Rows = Iterator[tuple[str, Example | ValueError]]  # each with where it stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A table of examples, a way to ask, and a way to score."""

    name: str
    title: str
    metrics: tuple[Metric, ...]  # the first decides whether decoders differ
    places: tuple[tuple[str, ...], ...]  # files in the data folder; the first alternative that is there is read
    parse: Callable[[tuple[Path, ...]], Rows]
    give: str  # what to give where no file was found
    ask: Callable[[Example, bool], str] = lambda example, chat: example.text
    """The prompt, for a model with a chat template or without."""
    score: Callable[[Example, Answer, ProgramLimits], Score] = lambda example, answer, limits: Score({})
    max_new_tokens: int = 128
    stops: tuple[str, ...] = ()
    """Where an answer without a chat template ends."""
    is_pass: bool = False
    """Answers pass or fail, so that several of them make pass@k."""
    runs_code: bool = False
    needs: str | None = None
    """A package that scores it."""
    reads_document: bool = False
    """What is asked is what to make of a document, so that an encoder can read it and no question is needed."""
    is_text: bool = False
    """A text to read instead of questions to answer."""

    @property
    def primary(self) -> Metric:
        return self.metrics[0]

    def find(self, folder: Path | None) -> tuple[Path, ...]:
        """The task's files, or an error that says what to give."""
        if folder is None:
            raise InvalidArgument(
                f"task {self.name!r} needs {self.give}: give its folder with --data FOLDER, or set FORERUN_DATA"
            )
        for names in self.places:
            if all((folder / name).is_file() for name in names):
                return tuple(folder / name for name in names)
        wanted = ", or ".join(" with ".join(names) for names in self.places)
        raise InvalidArgument(f"task {self.name!r}: {str(folder)!r} has no {wanted}; put {self.give} there")

    def read(self, folder: Path | None) -> TaskData:
        paths = self.find(folder)
        examples: dict[str, Example] = {}
        bad = []
        for where, row in self.parse(paths):
            if isinstance(row, ValueError):
                bad.append(BadRow(where, str(row)))
            elif row.id in examples:
                bad.append(BadRow(where, f"has the same id as an earlier row, {row.id!r}"))
            else:
                examples[row.id] = row
        if not examples:
            reason = f"; the first bad row is {bad[0].where}: {bad[0].why}" if bad else ""
            raise InvalidArgument(f"task {self.name!r}: no good rows in {paths[0].name}{reason}. Give {self.give}")
        return TaskData(self, tuple(examples.values()), fingerprint(paths, len(examples)), tuple(bad))


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task, and what its files hold."""

    task: Task
    examples: tuple[Example, ...]
    source: str  # for records: file names and a fingerprint, no folders
    bad: tuple[BadRow, ...] = ()


def fingerprint(paths: Sequence[Path], rows: int) -> str:
    """File names, rows and a checksum: what a record says of its data, without folders."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    names = ", ".join(path.name for path in paths)
    return f"{names} ({rows} rows, sha256 {whole.hexdigest()[:12]})"
