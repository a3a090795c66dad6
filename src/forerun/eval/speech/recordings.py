"""Recordings with what is said in them, listed in a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.eval.tasks.rows import json_rows, text
from forerun.eval.tasks.task import BadRow, Example, Rows, Task

GIVE = "speech/manifest.jsonl, a line for each recording with the fields audio (a path beside it) and text"


@dataclass(frozen=True, slots=True)
class Recording:
    """A sound file and its words."""

    path: Path
    text: str
    source: str  # the folder it lies in: recordings of one kind


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A data folder's manifest as it was read: its recordings, and the rows that cannot be used."""

    recordings: tuple[Recording, ...]
    source: str  # for records: file name, rows and a fingerprint
    bad: tuple[BadRow, ...]


def find(folder: Path | None) -> ReadManifest:
    """The manifest of a data folder, read; rows that cannot be used are named, not used."""
    (manifest,) = MANIFEST.find(folder)
    data = MANIFEST.read(folder)
    recordings = tuple(
        Recording(manifest.parent / row.id, row.text, Path(row.id).parent.name or "all") for row in data.examples
    )
    return ReadManifest(recordings, data.source, data.bad)


def _parse(paths: tuple[Path, ...]) -> Rows:
    for where, row in json_rows(_example)(paths):
        if isinstance(row, ValueError) or (paths[0].parent / row.id).is_file():
            yield where, row
        else:
            yield where, ValueError(f"there is no file {row.id!r} beside the manifest")


def _example(row: Mapping[str, Any]) -> Example:
    return Example(id=text(row, "audio"), text=text(row, "text"), reference=None)


MANIFEST = Task(
    name="asr",
    title="Speech",
    metrics=(),
    places=(("speech/manifest.jsonl",), ("manifest.jsonl",)),
    parse=_parse,
    give=GIVE,
)
