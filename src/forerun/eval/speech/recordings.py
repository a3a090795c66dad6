"""Recordings with what is said in them, listed in a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.eval.tasks.rows import json_rows, text
from forerun.eval.tasks.task import Bad, Example

PLACES = ("speech/manifest.jsonl", "manifest.jsonl")
GIVE = "speech/manifest.jsonl, a line for each recording with the fields audio (a path beside it) and text"


@dataclass(frozen=True, slots=True)
class Recording:
    """A sound file and its words."""

    path: Path
    text: str
    source: str  # the folder it lies in: recordings of one kind


@dataclass(frozen=True, slots=True)
class Listed:
    recordings: tuple[Recording, ...]
    manifest: Path
    bad: tuple[Bad, ...]


def find(folder: Path | None) -> Listed:
    """The manifest of a data folder, read; rows that cannot be used are named, not used."""
    if folder is None:
        raise InvalidArgument(f"task 'asr' needs {GIVE}: give its folder with --data FOLDER, or set FORERUN_DATA")
    manifest = next((folder / place for place in PLACES if (folder / place).is_file()), None)
    if manifest is None:
        raise InvalidArgument(f"task 'asr': {str(folder)!r} has no {' or '.join(PLACES)}; give {GIVE}")
    found, bad = [], []
    for where, row in json_rows(_example)((manifest,)):
        if isinstance(row, ValueError):
            bad.append(Bad(where, str(row)))
        elif not (path := manifest.parent / row.id).is_file():
            bad.append(Bad(where, f"there is no file {row.id!r} beside the manifest"))
        else:
            found.append(Recording(path, row.text, Path(row.id).parent.name or "all"))
    if not found:
        reason = f"; the first bad row is {bad[0].where}: {bad[0].why}" if bad else ""
        raise InvalidArgument(f"task 'asr': no recordings in {manifest.name}{reason}. Give {GIVE}")
    return Listed(tuple(found), manifest, tuple(bad))


def spread(recordings: tuple[Recording, ...], limit: int | None) -> tuple[Recording, ...]:
    """At most `limit` of them, spread evenly over the manifest."""
    if limit is None or limit >= len(recordings):
        return recordings
    return tuple(recordings[i * len(recordings) // limit] for i in range(limit))


def _example(row: Mapping[str, Any]) -> Example:
    return Example(id=text(row, "audio"), text=text(row, "text"), reference=None)
