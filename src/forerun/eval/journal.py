"""Answers as they come, one call a line, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.config import ModelSettings, SpeculationSettings, kernels, num_ranks
from forerun.errors import ForerunError, InvalidArgument
from forerun.eval.tasks import Answer
from forerun.files import parse_json
from forerun.loading.digest import files_digest
from forerun.measure.record import as_json
from forerun.measure.stored import read

FORMAT = 2  # 1 did not say how the models were run
REMEDY = "give another --output, or delete it"
SHOWN = ("model", "draft", "policy", "rule")  # these the settings of a run hold already
ELSEWHERE = ("offline",)  # says where to look, not what is found
WITH_FILES = ("ngram", "shared")  # drafters that are written KIND:NAME, and NAME has files


def journal_path(output: Path) -> Path:
    """Where the answers stand, beside the record."""
    return output.with_name(output.stem + ".answers.jsonl")


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
        head = {"format": FORMAT, "settings": as_json(identity)}
        if lines := self._read():
            self._check_settings(lines[0], head["settings"])
            self._take_over(lines[1:])
        else:
            self._append(head)
        self.resumed = len(self.entries)

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
        entries = [entry for entry in self.entries.values() if (entry.task, entry.way) == (task, way)]
        return sorted(entries, key=lambda entry: entry.call)

    def _append(self, content: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ForerunError(f"cannot write {str(self.path)!r} ({error.strerror}); give another --output") from error

    def _read(self) -> list[Any]:
        """The lines that are there. A last one that was cut off by a kill is dropped, from the file as well."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return []
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(self.path, len(whole) + (1 if whole else 0))
        try:
            return [parse_json(line.decode("utf-8")) for line in whole.split(b"\n")] if whole else []
        except ValueError as error:
            raise self._damaged(error) from error

    def _check_settings(self, head: Any, settings: Mapping[str, Any]) -> None:
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise InvalidArgument(f"{str(self.path)!r} is not a journal of answers of format {FORMAT}; {REMEDY}")
        before = head.get("settings", {})
        for name, now in settings.items():
            if before.get(name) != now:
                raise InvalidArgument(
                    f"{self.path.name} holds answers with {name}={before.get(name)!r}, and now it is {now!r}; {REMEDY}"
                )

    def _take_over(self, lines: Sequence[Any]) -> None:
        try:
            for content in lines:
                if "call" in content:
                    entry: Entry = read(Entry, content, "answers")
                    self.entries[entry.key] = entry
                else:
                    self.sources[content["task"]] = content["source"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> InvalidArgument:
        return InvalidArgument(f"{str(self.path)!r} is damaged ({type(error).__name__}: {error}); {REMEDY}")


def pair_identity(options: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """What two runs must share for their answers to belong together, beyond the settings that a record shows: how
    target and drafter are run, on which device, and their files.

    A record names models without their folders, and a name may stand for other weights tomorrow: so the files count.
    """
    names = [field.name for kind in (ModelSettings, SpeculationSettings) for field in fields(kind)]
    how = {name: options[name] for name in names if name in options and name not in (*SHOWN, *ELSEWHERE)}
    how |= {"device": str(device), "kernels": str(kernels(options["kernels"]))}
    how["tensor_parallel"] = num_ranks(options.get("tensor_parallel", 1))
    drafts = [files_digest(_place(part.strip())) for part in options["draft"].split(",")]
    return how | {"files of the model": files_digest(options["model"]), "files of the draft": drafts}


def _place(draft: str) -> str:
    kind, _, rest = draft.partition(":")
    return rest if kind in WITH_FILES else draft
