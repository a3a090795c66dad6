"""Rows of JSON and of paired text files, each with where it stands; a bad one is a ValueError, never a crash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.eval.tasks.task import Example, Rows
from forerun.files import read_text
from forerun.prompts import filled_text, rows_in


def json_rows(make: Callable[[Mapping[str, Any]], Example]) -> Callable[[tuple[Path, ...]], Rows]:
    """JSONL, a JSON list, or either of them gzipped. `make` may raise what a bad row makes it raise."""

    def parse(paths: tuple[Path, ...]) -> Rows:
        for path in paths:
            for where, row in rows_in(read_text(path), path.name, ".json"):
                yield where, row if isinstance(row, ValueError) else _example(make, row)

    return parse


def line_pairs(make: Callable[[str, str, str], Example]) -> Callable[[tuple[Path, ...]], Rows]:
    """Documents and references, line by line in two files. `make(number, document, reference)`."""

    def parse(paths: tuple[Path, ...]) -> Rows:
        documents, references = (_lines(path) for path in paths[:2])
        if len(documents) != len(references):
            raise InvalidArgument(
                f"{paths[0].name} has {len(documents)} lines and {paths[1].name} {len(references)}: they must match"
            )
        for number, (document, reference) in enumerate(zip(documents, references, strict=True), 1):
            where = f"{paths[0].name}, line {number}"
            if not document.strip() or not reference.strip():
                yield where, ValueError("document or reference is empty")
            else:
                yield where, make(str(number), document, reference)

    return parse


def text(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is there; it must be text."""
    for name in names:
        if name in row:
            return filled_text(row[name], name)
    raise ValueError(f"has no field {' or '.join(names)}")


def identity(row: Mapping[str, Any], *names: str, otherwise: str) -> str:
    """An id if the row has one, else a fingerprint of what it asks."""
    for name in names:
        if isinstance(row.get(name), str | int):
            return str(row[name])
    return hashlib.sha256(otherwise.encode()).hexdigest()[:12]


def _lines(path: Path) -> list[str]:
    return read_text(path).rstrip("\n").split("\n")


def _example(make: Callable[[Mapping[str, Any]], Example], row: Any) -> Example | ValueError:
    if not isinstance(row, dict):
        return ValueError(f"a {type(row).__name__} where an object was expected")
    try:
        return make(row)
    except ValueError as error:
        return error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        return ValueError(f"{type(error).__name__}: {error}")
