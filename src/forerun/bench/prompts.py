"""Prompts to measure with: Spec-Bench's questions where they can be found, else a few of our own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forerun.bench.builtin import BUILT_IN
from forerun.config import data_folder
from forerun.errors import InvalidArgument
from forerun.files import read_text
from forerun.prompts import encode_prompts, prompt_of, rows_of, uses_template

MT_BENCH = "mt_bench"
MT_BENCH_PARTS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PLACES = ("spec_bench/question.jsonl", "question.jsonl")
"""Where the questions lie in the data folder."""


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of a question."""

    category: str  # as the file names it
    text: str


@dataclass(frozen=True, slots=True)
class Questions:
    """All there is to ask, and where it comes from."""

    items: tuple[Question, ...]
    source: str  # for records: a name and a fingerprint, no folders
    note: str | None = None  # what the user should hear

    @property
    def categories(self) -> tuple[str, ...]:
        """Those that are measured unless others are asked for: MT-bench's parts count as one."""
        return tuple(dict.fromkeys(whole(question.category) for question in self.items))

    def of(self, category: str) -> list[Question]:
        """All questions of a category, or of a part of MT-bench; MT-bench itself takes its parts in turn."""
        chosen = [q for q in self.items if q.category == category]
        if category == MT_BENCH and not chosen:
            parts = ([q for q in self.items if q.category == part] for part in MT_BENCH_PARTS)
            chosen = [q for row in zip_longest(*parts) for q in row if q is not None]
        if not chosen:
            names = ", ".join(dict.fromkeys((*self.categories, *(q.category for q in self.items))))
            raise InvalidArgument(f"no questions of category {category!r} in {self.source}; there are: {names}")
        return chosen


def whole(category: str) -> str:
    return MT_BENCH if category in MT_BENCH_PARTS else category


def find_questions(path: Path | None = None) -> Questions:
    """From `path` (a file, or a folder with one), else from the data folder of the environment, else our own."""
    if path is not None:
        return read_questions(_file_in(path) or path)
    folder = data_folder()
    file = _file_in(folder) if folder else None
    return read_questions(file) if file else built_in(folder)


def built_in(folder: Path | None = None) -> Questions:
    items = tuple(Question(category, text) for category, texts in BUILT_IN.items() for text in texts)
    missing = f"there is no {PLACES[0]} in {str(folder)!r}" if folder else "no prompts were given"
    note = (
        f"{missing}, so Forerun's own {len(items)} prompts are used. For figures that compare with others', "
        "give Spec-Bench's question.jsonl: --data FILE, or FORERUN_DATA for the folder that has it."
    )
    return Questions(items, f"Forerun's own {len(items)} prompts", note)


def read_questions(path: Path) -> Questions:
    """A file in Spec-Bench's form: one JSON object a line with `category` and `turns`."""
    items = tuple(_question(row, where) for where, row in rows_of(path))
    if not items:
        raise InvalidArgument(f"{str(path)!r} holds no questions; give Spec-Bench's question.jsonl")
    fingerprint = hashlib.sha256(read_text(path).encode()).hexdigest()[:12]
    return Questions(items, f"{path.name} ({len(items)} questions, sha256 {fingerprint})")


def encode(tokenizer: Any, questions: Sequence[Question]) -> list[tuple[int, ...]]:
    """Token ids of each question as one would ask it in a chat, where the model has a template for that."""
    return encode_prompts(tokenizer, [question.text for question in questions], uses_template(tokenizer))


def pools(
    questions: Questions, categories: Sequence[str], tokenizer: Any, longest: int | None
) -> dict[str, list[tuple[int, ...]]]:
    """Prompts of each category that leave room in the model's context: at most `longest` tokens."""
    encoded = {category: encode(tokenizer, questions.of(category)) for category in categories}
    return {
        category: list(dict.fromkeys(p for p in prompts if longest is None or len(p) <= longest))
        for category, prompts in encoded.items()
    }


def _file_in(path: Path) -> Path | None:
    if path.is_file():
        return path
    return next((path / place for place in PLACES if (path / place).is_file()), None)


def _question(row: Any, where: str) -> Question:
    form = 'each line must be like {"category": "qa", "turns": ["..."]}'
    try:
        text = prompt_of(row)
    except ValueError as error:
        raise InvalidArgument(f"{where}: {error}; {form}") from error
    category = row.get("category") if isinstance(row, dict) else None
    if not isinstance(category, str) or not isinstance(text, str):
        raise InvalidArgument(f"{where}: category and the first turn must be text; {form}")
    return Question(category, text)
