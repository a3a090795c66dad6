"""Prompts from arguments, files and pipes, and what the model is given of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunWarning, InvalidArgument
from forerun.files import parse_json, read_text
from forerun.inputs import chat_ids, text_ids

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

Message = dict[str, str]
# A prompt is text, or a conversation.
Prompt = str | list[Message]
FIELDS = ("prompt", "text", "turns")


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[Prompt]:
    """Arguments first ('-' is stdin as one prompt), then the file's prompts. With neither, stdin, if it is a pipe."""
    if not arguments and file is None and not sys.stdin.isatty():
        arguments = ["-"]
    if [*arguments, str(file)].count("-") > 1:
        raise InvalidArgument("standard input was asked for twice, and can be read once: leave one '-' out")
    prompts: list[Prompt] = [_standard_input() if text == "-" else text for text in arguments]
    if file is not None:
        prompts += _from_file(file)
    if not prompts:
        raise InvalidArgument("no prompt: give one as an argument, with --file, or through a pipe")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise InvalidArgument(f"prompt {number} is empty: give at least one word")
    return prompts


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"standard input is not text ({error.reason} at byte {error.start})") from error


def _from_file(path: Path) -> list[Prompt]:
    lines = (_standard_input() if str(path) == "-" else read_text(path)).splitlines()
    is_jsonl = path.suffix in (".jsonl", ".ndjson") or (bool(lines) and lines[0].lstrip().startswith("{"))
    prompts = [
        _from_json(line, f"{path}, line {number}") if is_jsonl else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise InvalidArgument(
            f"{path} holds no prompts: write one a line, or JSONL with one of the fields {', '.join(FIELDS)}"
        )
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise InvalidArgument(f"{where}: {error}") from error
    name = next((name for name in FIELDS if isinstance(entry, dict) and name in entry), None)
    if name is None:
        raise InvalidArgument(f"{where}: no field {', '.join(FIELDS)}")
    return _conversation(entry[name], where) if name == "turns" else _text(entry[name], where, name)


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}: field {name!r} is {type(value).__name__}, not text")
    return value


def _conversation(turns: Any, where: str) -> Prompt:
    """Messages with roles as they are; of bare texts, which are a user's turns with no answers between, the first."""
    if not isinstance(turns, list) or not turns:
        raise InvalidArgument(f"{where}: field 'turns' must be a list with at least one turn")
    if all(isinstance(turn, str) for turn in turns):
        if len(turns) > 1:
            warnings.warn(
                "'turns' holds several texts and no answers: only the first is used", ForerunWarning, stacklevel=2
            )
        return str(turns[0])
    if all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
        return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in turns]
    raise InvalidArgument(f"{where}: 'turns' must be texts, or messages with 'role' and 'content'")


def uses_template(tokenizer: Any, chat: bool | None, system: str | None, prompts: Sequence[Prompt]) -> bool:
    """Whether prompts go through the chat template: as asked, else where the tokenizer has one."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    use = has_template if chat is None else chat
    if use and not has_template:
        raise InvalidArgument("--chat: this model's tokenizer has no chat template; use --no-chat")
    if not use and system is not None:
        raise InvalidArgument("--system needs a chat template; leave it out, or put it into the prompt")
    if not use and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidArgument("a conversation with roles needs a chat template, and there is none or it was turned off")
    return use


def encode(tokenizer: Any, prompt: Prompt, template: bool, system: str | None = None) -> list[int]:
    """Token ids of one prompt."""
    if template:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        start = [] if system is None else [{"role": "system", "content": system}]
        ids = chat_ids(tokenizer, [*start, *messages])
    else:
        assert isinstance(prompt, str)
        ids = text_ids(tokenizer, prompt)
    if not ids:
        raise InvalidArgument(f"prompt {prompt!r} has no tokens in this model's vocabulary")
    return ids


def with_task_prefix(model: PreTrainedModel, task: str, prompts: Sequence[Prompt], console: Console) -> list[Prompt]:
    """The prompts with the task's prefix in front. What else its configuration asks for is named, not used."""
    known: dict[str, dict[str, Any]] = getattr(model.config, "task_specific_params", None) or {}
    if task not in known:
        names = f"it knows {', '.join(sorted(known))}" if known else "it knows none; leave --task out"
        raise InvalidArgument(
            f"--task {task!r}: no task of {model.config.name_or_path or type(model).__name__}; {names}"
        )
    settings = dict(known[task])
    prefix = settings.pop("prefix", "")
    if settings:
        told = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        console.print(f"--task {task}: prefix {prefix!r}; not used: {told}", style="dim", markup=False, highlight=False)
    return [prefix + _plain_text(prompt) for prompt in prompts]


def _plain_text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise InvalidArgument("--task takes texts, not conversations with roles")
    return prompt
