"""Prompts from files of many shapes, and what the target is given of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.files import OPENERS, parse_json, read_text

Message = dict[str, str]
# Text, which becomes a user's turn, or a conversation that ends with one.
Prompt = str | list[Message]

FIELDS = ("prompt", "text", "question", "instruction")  # of plain text
CONVERSATIONS = ("turns", "messages")


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
        for where, row in _rows(path, paragraphs):
            try:
                prompt = _prompt(row)
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
            f"{', '.join((*FIELDS, *CONVERSATIONS))}"
        )
    return Reading(tuple(prompts.values()), len(bad), bad[0] if bad else None)


def uses_template(tokenizer: Any, chat: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else where the tokenizer has one."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise InvalidArgument("--chat: this model's tokenizer has no chat template; use --raw")
    return has_template if chat is None else chat


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], template: bool) -> list[tuple[int, ...]]:
    """Token ids of each prompt, up to where the target begins to write."""
    if not prompts:
        return []
    texts = [_render(tokenizer, prompt) if template else _plain(prompt) for prompt in prompts]
    rows = tokenizer(texts, add_special_tokens=not template, padding=False, verbose=False)["input_ids"]
    return [tuple(row) for row in rows]


def _render(tokenizer: Any, prompt: Prompt) -> str:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def _plain(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _rows(path: Path, paragraphs: bool) -> Iterator[tuple[str, Any]]:
    """Each row of a file with where it stands: a JSON value, text, or the ValueError that reading it gave."""
    text = read_text(path)
    kind = (path.with_suffix("") if path.suffix in OPENERS else path).suffix
    if kind == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(_json_list(path, text), start=1):
            yield f"{path}, entry {number}", row
    elif kind in (".json", ".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}, line {number}", _json(line)
    else:
        for number, part in _text_parts(text, paragraphs):
            yield f"{path}, line {number}", part


def _text_parts(text: str, paragraphs: bool) -> Iterator[tuple[int, str]]:
    """Lines, or paragraphs (set apart by empty lines), each with the number of its first line."""
    held: list[str] = []
    first = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if not held:
            first = number
        if line.strip():
            held.append(line.strip())
        if held and (not paragraphs or not line.strip()):
            yield first, "\n".join(held)
            held = []


def _json_list(path: Path, text: str) -> list[Any]:
    try:
        rows: list[Any] = parse_json(text)
    except ValueError as error:
        raise InvalidArgument(f"{path}: {error}; correct the file") from error
    return rows


def _json(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def _prompt(row: Any) -> Prompt:
    """What a row asks; ValueError says why it asks nothing."""
    if isinstance(row, ValueError):
        raise row
    if isinstance(row, str):
        return _text(row, "the row")
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object or a text was expected")
    for name in CONVERSATIONS:
        if name in row:
            return _conversation(row[name], name)
    for name in FIELDS:
        if name in row:
            text = _text(row[name], name)
            more = row.get("input") if name == "instruction" else None
            return f"{text}\n\n{_text(more, 'input')}" if more else text
    raise ValueError(f"none of the fields {', '.join((*FIELDS, *CONVERSATIONS))}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    return value


def _conversation(turns: Any, name: str) -> Prompt:
    """Messages up to the last one that is not the assistant's; of bare texts, which have no answers, the first."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} must be a list with at least one turn")
    if isinstance(turns[0], str):
        return _text(turns[0], name)
    if not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
        raise ValueError(f"{name} must hold texts, or messages with role and content")
    messages = [{"role": str(turn["role"]), "content": _text(turn["content"], "content")} for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"{name} holds nothing but the assistant's words")
    return messages
