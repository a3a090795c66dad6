"""Prompts for training: those of many files, each once, with bad rows counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import InvalidArgument
from forerun.prompts import FIELDS, Prompt, prompt_of, rows_of


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompts of some files."""

    prompts: tuple[Prompt, ...]
    num_bad: int = 0
    first_bad: str | None = None  # file, line and reason

    @property
    def complaint(self) -> str | None:
        """What the user should hear, if anything."""
        if not self.num_bad:
            return None
        return f"{self.num_bad} bad row{'s' * (self.num_bad > 1)} skipped, the first in {self.first_bad}"


def read_prompts(paths: Sequence[Path], *, paragraphs: bool = False, strict: bool = False) -> Reading:
    """All prompts of `paths`, in order, each once. A bad row is skipped and counted, or with `strict` an error."""
    prompts: dict[str, Prompt] = {}  # by their JSON, so that each is there once
    bad: list[str] = []
    for path in paths:
        for where, row in rows_of(path, paragraphs=paragraphs):
            try:
                prompt = prompt_of(row.strip() if isinstance(row, str) else row)
            except ValueError as error:
                if strict:
                    raise InvalidArgument(f"{where}: {error}; correct it, or leave --strict out to skip it") from error
                bad.append(f"{where}: {error}")
                continue
            prompts.setdefault(json.dumps(prompt), prompt)
    if not prompts:
        names = ", ".join(map(str, paths))
        reason = f"; all rows were bad, the first in {bad[0]}" if bad else ""
        raise InvalidArgument(
            f"no prompts in {names}{reason}. Give text, one prompt a line, or JSONL with one of the fields "
            f"{', '.join(FIELDS)}"
        )
    return Reading(tuple(prompts.values()), len(bad), bad[0] if bad else None)
