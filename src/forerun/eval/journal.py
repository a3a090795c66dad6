"""Answers as they come, one call a line, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, InvalidArgument
from forerun.files import parse_json

FORMAT = 1
REMEDY = "give another --output, or delete it"


def journal_path(output: Path) -> Path:
    """Where the answers stand, beside the record."""
    return output.with_name(output.stem + ".answers.jsonl")


@dataclass(frozen=True, slots=True)
class Answer:
    """One sequence, scored."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    seconds: float  # from the beginning of the call to the end of this sequence
    mean_logprob: float | None
    rounds: int
    drafted: int
    accepted: int
    scores: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """All sequences of one example."""

    index: int
    id: str
    category: str
    answers: tuple[Answer, ...]
    agreement: str | None = None  # with the other way's text, on the entry that came second


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of one way: examples that were answered, or a window of text that was read."""

    task: str
    call: int
    way: str
    seconds: float
    examples: tuple[Answered, ...] = ()
    nll: float = 0.0  # of a window: minus the log-probability of its scored tokens
    tokens: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task, self.call, self.way


class Journal:
    """Lines of JSON: the settings, then for each task its data, then its calls."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open `path`, with what is already there if it belongs to the same settings."""
        self.path = path
        self.entries: dict[tuple[str, int, str], Entry] = {}
        self.sources: dict[str, str] = {}
        head = {"format": FORMAT, "settings": json.loads(json.dumps(dict(identity)))}
        lines = self._take_over(head)
        self.resumed = len(self.entries)
        if not lines:
            self._append(head)

    def begin(self, task: str, source: str) -> None:
        """Note what a task is read from; other data than before cannot be mixed in."""
        if task not in self.sources:
            self.sources[task] = source
            self._append({"task": task, "source": source})
        elif self.sources[task] != source:
            raise InvalidArgument(
                f"{self.path.name} holds answers of {task!r} to {self.sources[task]}, and now it is {source}; {REMEDY}"
            )

    def write(self, entry: Entry) -> None:
        self._append(asdict(entry))
        self.entries[entry.key] = entry

    def of(self, task: str, way: str) -> list[Entry]:
        """In the order of the calls."""
        found = [entry for entry in self.entries.values() if (entry.task, entry.way) == (task, way)]
        return sorted(found, key=lambda entry: entry.call)

    def _append(self, content: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ForerunError(f"cannot write {str(self.path)!r} ({error.strerror}); give another --output") from error

    def _take_over(self, head: Mapping[str, Any]) -> int:
        """Read what is there. A last line that was cut off by a kill is dropped, from the file as well."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return 0
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(self.path, len(whole) + (1 if whole else 0))
        lines = whole.split(b"\n") if whole else []
        try:
            for number, line in enumerate(lines):
                self._take(parse_json(line.decode("utf-8")), head if number == 0 else None)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(
                f"{str(self.path)!r} is damaged ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        return len(lines)

    def _take(self, content: dict[str, Any], head: Mapping[str, Any] | None) -> None:
        if head is not None:
            self._compare(content, head)
        elif "call" in content:
            entry = _entry(content)
            self.entries[entry.key] = entry
        else:
            self.sources[content["task"]] = content["source"]

    def _compare(self, content: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        if content.get("format") != FORMAT:
            raise InvalidArgument(f"{str(self.path)!r} is not a journal of answers of format {FORMAT}; {REMEDY}")
        before, now = content["settings"], head["settings"]
        for name in now:
            if before.get(name) != now[name]:
                raise InvalidArgument(
                    f"{self.path.name} holds answers with {name}={before.get(name)!r}, and now it is {now[name]!r}; "
                    f"{REMEDY}"
                )


def _entry(content: dict[str, Any]) -> Entry:
    return Entry(**content | {"examples": tuple(map(_answered, content["examples"]))})


def _answered(content: dict[str, Any]) -> Answered:
    return Answered(**content | {"answers": tuple(map(_answer, content["answers"]))})


def _answer(content: dict[str, Any]) -> Answer:
    return Answer(**content | {"tokens": tuple(content["tokens"])})
