"""Prompts from arguments, files and pipes, and what the model is given of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.arguments import check_whole
from forerun.config import rank_and_size
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.inputs import chat_ids, text_ids
from forerun.prompts import CONVERSATIONS, FIELDS, Prompt, prompt_of, rows_in, rows_of, uses_template

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[Prompt]:
    """The prompts of `read_placed`."""
    return [prompt for _, prompt in read_placed(arguments, file)]


def read_placed(arguments: Sequence[str], file: Path | None) -> list[tuple[str, Prompt]]:
    """Each prompt behind where it stands, for errors that come later.

    Arguments first ('-' is stdin as one prompt), then the file's prompts. With neither, stdin, if it is a pipe.
    """
    if rank_and_size()[0] > 0:  # rank 0 alone decodes, and standard input can be read once
        return [("", "")]
    if not arguments and file is None and not sys.stdin.isatty():
        arguments = ["-"]
    if [*arguments, str(file)].count("-") > 1:
        raise InvalidArgument("standard input was asked for twice, and can be read once: leave one '-' out")
    texts = (_standard_input() if text == "-" else text for text in arguments)
    prompts = [_argument(text, number) for number, text in enumerate(texts, start=1)]
    if file is not None:
        prompts += _from_file(file)
    if not prompts:
        raise InvalidArgument("no prompt: give one as an argument, with --file, or through a pipe")
    return prompts


def _argument(text: str, number: int) -> tuple[str, Prompt]:
    where = f"prompt {number}"
    if not text.strip():
        raise InvalidArgument(f"{where} is empty: give at least one word")
    try:
        check_whole(text, where)
    except ValueError as error:
        raise InvalidArgument(f"{error}: check how it is written") from error
    return where, text


def _standard_input() -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff")  # the mark that some programs begin UTF-8 with
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"standard input is not text ({error.reason} at byte {error.start})") from error


def _from_file(path: Path) -> list[tuple[str, Prompt]]:
    if str(path) == "-":
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(newline="")  # a carriage return by itself ends no line here either
        rows = rows_in(_standard_input(), "-")
    else:
        rows = rows_of(path)
    prompts = [(where, _from_row(row, where)) for where, row in rows]
    if not prompts:
        raise InvalidArgument(
            f"{path} holds no prompts: write one a line, or JSONL with one of the fields {', '.join(FIELDS)}"
        )
    return prompts


def _from_row(row: Any, where: str) -> Prompt:
    try:
        prompt = prompt_of(row)
    except ValueError as error:
        raise InvalidArgument(f"{where}: {error}") from error
    if isinstance(prompt, str) and any(isinstance(row, dict) and len(row.get(name, ())) > 1 for name in CONVERSATIONS):
        warnings.warn("a row holds several texts and no answers: only the first is used", ForerunWarning, stacklevel=2)
    return prompt


def check_template(tokenizer: Any, chat: bool | None, system: str | None, prompts: Sequence[Prompt]) -> bool:
    """Whether prompts go through the chat template; what needs one is refused where they do not."""
    use = uses_template(tokenizer, chat)
    if not use and system is not None:
        raise InvalidArgument("--system needs a chat template; leave it out, or put it into the prompt")
    if not use and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidArgument("a conversation with roles needs a chat template, and there is none or it was turned off")
    return use


def encode_placed(
    tokenizer: Any, prompts: Sequence[Prompt], places: Sequence[str], template: bool, system: str | None = None
) -> list[list[int]]:
    """Token ids of each prompt; an error names the place of the one that cannot be encoded."""
    rows = []
    for where, prompt in zip(places, prompts, strict=True):
        try:
            rows.append(encode(tokenizer, prompt, template, system))
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error
    return rows


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
        unused = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        console.print(
            f"--task {task}: prefix {prefix!r}; not used: {unused}", style="dim", markup=False, highlight=False
        )
    return [prefix + _plain_text(prompt) for prompt in prompts]


def _plain_text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise InvalidArgument("--task takes texts, not conversations with roles")
    return prompt
