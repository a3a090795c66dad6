"""Prompts in files, whatever their shape, and their token ids: one reader for every command.

A file holds text, one prompt a line, or JSON: one object a line, one over several lines, or a list of objects or texts.
Commands differ in what they do about a bad row (refuse the file, or skip and count it), so reading rows and making
prompts of them are two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.arguments import check_whole
from forerun.errors import InvalidArgument
from forerun.files import OPENERS, parse_json, read_text
from forerun.inputs import render_chat

Message = dict[str, str]
# Text, which is a user's turn, or a conversation that ends with one.
Prompt = str | list[Message]

TEXTS = ("prompt", "text", "question", "instruction")
CONVERSATIONS = ("turns", "messages")
FIELDS = (*TEXTS, *CONVERSATIONS)


def rows_of(path: Path, *, paragraphs: bool = False) -> Iterator[tuple[str, Any]]:
    """Each row of a file, behind where it stands: see `rows_in`."""
    suffix = (path.with_suffix("") if path.suffix in OPENERS else path).suffix
    return rows_in(read_text(path), str(path), suffix, paragraphs=paragraphs)


def rows_in(text: str, name: str, suffix: str = "", *, paragraphs: bool = False) -> Iterator[tuple[str, Any]]:
    """Each row of a file's text, behind where it stands: a JSON value, text, or the ValueError that reading it gave."""
    if (rows := _json_list(text, name, suffix)) is not None:
        for number, row in enumerate(rows, start=1):
            yield f"{name}, entry {number}", row
    elif (row := _json_object(text, suffix)) is not None:
        yield f"{name}, entry 1", row
    elif suffix in (".json", ".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold what `splitlines` takes for an end
            if line.strip():
                yield f"{name}, line {number}", _json(line)
    else:
        for number, part in _text_parts(text, paragraphs):
            yield f"{name}, line {number}", part


def prompt_of(row: Any) -> Prompt:
    """What a row asks; ValueError says why it asks nothing."""
    if isinstance(row, ValueError):
        raise row
    if isinstance(row, str):
        return filled_text(row, "the row")
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object or a text was expected")
    for name in CONVERSATIONS:
        if name in row:
            return _conversation(row[name], name)
    for name in TEXTS:
        if name in row:
            text = filled_text(row[name], name)
            more = row.get("input") if name == "instruction" else None
            return f"{text}\n\n{filled_text(more, 'input')}" if more else text
    raise ValueError(f"none of the fields {', '.join(FIELDS)}")


def uses_template(tokenizer: Any, chat: bool | None = None, off: str = "--no-chat") -> bool:
    """Whether prompts go through the chat template: as asked, else where the tokenizer has one. `off` is the remedy."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise InvalidArgument(f"--chat: this model's tokenizer has no chat template; use {off}")
    return has_template if chat is None else chat


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], template: bool) -> list[tuple[int, ...]]:
    """Token ids of each prompt, up to where the model begins to write."""
    return encode_rendered(tokenizer, [rendered(tokenizer, prompt, template) for prompt in prompts], template)


def rendered(tokenizer: Any, prompt: Prompt, template: bool) -> str:
    """A prompt as the model reads it; InvalidArgument where the chat template refuses it."""
    return render_chat(tokenizer, _messages(prompt)) if template else _plain(prompt)


def encode_rendered(tokenizer: Any, texts: Sequence[str], template: bool) -> list[tuple[int, ...]]:
    """Token ids of texts that `rendered` has made, all in one call: that is what tokenizers are fast at."""
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=not template, padding=False, verbose=False)["input_ids"]
    return [tuple(row) for row in rows]


def _messages(prompt: Prompt) -> list[Message]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _plain(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _text_parts(text: str, paragraphs: bool) -> Iterator[tuple[int, str]]:
    """Lines, or paragraphs (set apart by empty lines), each behind the number of its first line.

    A line ends at \\n or \\r\\n; what else `splitlines` takes for an end may stand in a prompt.
    """
    held: list[str] = []
    first = 1
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for number, line in enumerate([*lines, ""], start=1):
        if not held:
            first = number
        if line.strip():
            held.append(line)
        if held and (not paragraphs or not line.strip()):
            yield first, "\n".join(held)
            held = []


def _json_list(text: str, name: str, suffix: str) -> list[Any] | None:
    """The entries of a text that is a list: by its name, or because it can be read as one of objects or texts."""
    if suffix in (".jsonl", ".ndjson") or not text.lstrip().startswith("["):
        return None
    try:
        rows: list[Any] = parse_json(text)
    except ValueError as error:
        if suffix != ".json":
            return None
        raise InvalidArgument(f"{name}: {error}; correct it, or fetch it again") from error
    return rows if suffix == ".json" or all(isinstance(row, dict | str) for row in rows) else None


def _json_object(text: str, suffix: str) -> dict[str, Any] | None:
    """The one object of a text that holds no other and is written over several lines, as programs print it."""
    if suffix in (".jsonl", ".ndjson") or not text.lstrip().startswith("{") or "\n" not in text.strip():
        return None
    try:
        row = parse_json(text)
    except ValueError:
        return None
    assert isinstance(row, dict)  # what else begins with a brace is no JSON
    return row


def _json(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def filled_text(value: Any, name: str) -> str:
    """A field that must be text and say something; ValueError tells what is wrong with it."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    check_whole(value, name)
    return value


def _conversation(turns: Any, name: str) -> Prompt:
    """Messages up to the last one that is not the assistant's; of bare texts, which have no answers, the first."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} must be a list with at least one turn")
    if isinstance(turns[0], str):
        return filled_text(turns[0], name)
    if not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
        raise ValueError(f"{name} must hold texts, or messages with role and content")
    messages = [{"role": _role(turn), "content": filled_text(turn["content"], "content")} for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"{name} holds nothing but the assistant's words")
    return messages


def _role(turn: dict[str, Any]) -> str:
    role = str(turn["role"])
    check_whole(role, "role")
    return role
