"""Prompts for training: those of many files, each once, with bad rows counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.prompts import FIELDS, Prompt, encode_rendered, prompt_of, rendered, rows_of


@dataclass(frozen=True, slots=True)
class PromptReading:
    """The prompts of some files."""

    prompts: tuple[Prompt, ...]
    places: tuple[str, ...]  # of each prompt: file and line
    num_bad: int = 0
    first_bad: str | None = None  # file, line and reason

    @property
    def complaint(self) -> str | None:
        """What the user should hear, if anything."""
        if not self.num_bad:
            return None
        return f"{self.num_bad} bad row{'s' * (self.num_bad > 1)} skipped, the first in {self.first_bad}"


def read_prompts(paths: Sequence[Path], *, paragraphs: bool = False, strict: bool = False) -> PromptReading:
    """All prompts of `paths`, in order, each once. A bad row is skipped and counted, or with `strict` an error."""
    prompts: dict[str, tuple[Prompt, str]] = {}  # with their places, by their JSON, so that each is there once
    bad: list[str] = []
    for path in paths:
        for where, row in rows_of(path, paragraphs=paragraphs):
            try:
                prompt = prompt_of(row.strip() if isinstance(row, str) else row)
            except ValueError as error:
                if strict:
                    raise _refused(where, error) from error
                bad.append(f"{where}: {error}")
                continue
            prompts.setdefault(json.dumps(prompt), (prompt, where))
    if not prompts:
        names = ", ".join(map(str, paths))
        reason = f"; all rows were bad, the first in {bad[0]}" if bad else ""
        raise InvalidArgument(
            f"no prompts in {names}{reason}. Give text, one prompt a line, or JSONL with one of the fields "
            f"{', '.join(FIELDS)}"
        )
    texts, places = zip(*prompts.values(), strict=True)
    return PromptReading(texts, places, len(bad), bad[0] if bad else None)


def encode_reading(
    reading: PromptReading, tokenizer: Any, template: bool, *, strict: bool = False
) -> tuple[list[tuple[int, ...]], PromptReading]:
    """Token ids of the prompts, and the reading of those: one that the chat template refuses is a bad row as well."""
    texts: list[str] = []
    kept: list[tuple[Prompt, str]] = []
    bad: list[str] = []
    for prompt, where in zip(reading.prompts, reading.places, strict=True):
        try:
            texts.append(rendered(tokenizer, prompt, template))
        except InvalidArgument as error:
            if strict:
                raise _refused(where, error) from error
            bad.append(f"{where}: {error}")
            continue
        kept.append((prompt, where))
    if not kept:
        raise InvalidArgument(f"no prompt is left: the chat template refuses all, the first in {bad[0]}")
    prompts, places = zip(*kept, strict=True)
    first = reading.first_bad or (bad[0] if bad else None)
    return encode_rendered(tokenizer, texts, template), PromptReading(
        prompts, places, reading.num_bad + len(bad), first
    )


def _refused(where: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(f"{where}: {error}; correct it, or leave --strict out to skip it")
