"""From tasks to prompts: which examples, in which calls, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forerun.bench.prompts import Question, encode
from forerun.errors import InvalidArgument
from forerun.eval.methods import IndexedPrompt
from forerun.eval.settings import EvalSettings
from forerun.eval.tasks import Example, Task, TaskData
from forerun.eval.windows import Window, windows

Item = TypeVar("Item")
SOME = 3
"""Bad rows that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task ready to be answered."""

    task: Task
    source: str
    total: int  # examples there are
    examples: tuple[Example, ...]
    asked: tuple[IndexedPrompt, ...]  # one an example
    windows: tuple[Window, ...]
    keywords: dict[str, Any]  # for `generate`
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.windows) or len(self.asked)


@dataclass(frozen=True, slots=True)
class MissingTask:
    """A task that cannot be run."""

    task: str
    why: str


def find(tasks: Sequence[Task], folder: Path | None) -> tuple[list[TaskData], list[MissingTask]]:
    """Read every task's data; a task without any is named, not fatal."""
    present, missing = [], []
    for task in tasks:
        try:
            present.append(task.read(folder))
        except InvalidArgument as error:
            missing.append(MissingTask(task.name, str(error)))
    return present, missing


def spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` of them, evenly over the whole: files are often sorted by kind."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[place * len(items) // limit] for place in range(limit)]


def prepare(
    data: TaskData, tokenizer: Any, context: int | None, settings: EvalSettings, prefix: str | None = None
) -> Prepared:
    """`prefix` is what a model with an encoder reads before a document; None for a causal model."""
    task = data.task
    notes = bad_rows(data)
    if task.is_text:
        return _text(data, tokenizer, context, settings, notes)
    chat = getattr(tokenizer, "chat_template", None) is not None
    budget = settings.max_new_tokens or task.max_new_tokens
    texts = [task.ask(one, chat) if prefix is None else prefix + one.text for one in data.examples]
    encoded = encode(tokenizer, [Question("", text) for text in texts])
    pairs = [(index, *pair) for index, pair in enumerate(zip(data.examples, encoded, strict=True))]
    beside = budget if prefix is None else 0  # an encoder's text is no part of the decoder's
    fitting = [pair for pair in pairs if context is None or max(len(pair[2]) + beside, budget + 1) <= context]
    if not fitting:
        raise InvalidArgument(
            f"task {task.name!r}: no prompt leaves room for {budget} tokens in a context of {context}"
        )
    if len(fitting) < len(pairs):
        added = f" and {budget} new tokens" if beside else ""
        notes.append(
            f"{task.title}: {len(pairs) - len(fitting)} prompts left out, because they{added} exceed the context of "
            f"{context}"
        )
    kept = spread(fitting, settings.limit)
    return Prepared(
        task=task,
        source=data.source,
        total=len(pairs),
        examples=tuple(example for _, example, _ in kept),
        asked=tuple(IndexedPrompt(index, tokens) for index, _, tokens in kept),
        windows=(),
        keywords=_keywords(settings, budget, task.stops if prefix is None and not chat else ()),
        notes=tuple(notes),
    )


def bad_rows(data: TaskData) -> list[str]:
    bad = data.bad
    if not bad:
        return []
    named = "; ".join(f"{row.where}: {row.why}" for row in bad[:SOME])
    more = f"; and {len(bad) - SOME} more" if len(bad) > SOME else ""
    return [f"{data.task.title}: {len(bad)} bad row{'s' * (len(bad) > 1)} skipped ({named}{more})"]


def _text(data: TaskData, tokenizer: Any, context: int | None, settings: EvalSettings, notes: list[str]) -> Prepared:
    """Nothing is asked: the text itself is read."""
    size = settings.window if context is None else min(settings.window, context)
    tokens = tokenizer(data.examples[0].text, add_special_tokens=False, verbose=False)["input_ids"]
    every = windows(tokens, size)
    chosen = tuple(spread(every, settings.limit))
    if size < settings.window:
        notes.append(f"{data.task.title}: windows of {size} tokens, which is all the context the model has")
    return Prepared(data.task, data.source, len(every), (), (), chosen, {}, tuple(notes))


def _keywords(settings: EvalSettings, budget: int, stops: tuple[str, ...]) -> dict[str, Any]:
    """Only what was asked for: the decoder's defaults stay its own."""
    options = {"top_p": settings.top_p, "top_k": settings.top_k, "max_time": settings.max_time}
    keywords: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if settings.num_sequences > 1:
        keywords["num_return_sequences"] = settings.num_sequences
    if stops:
        keywords["stop_strings"] = list(stops)
    return keywords | {"max_new_tokens": budget, "temperature": settings.temperature, "seed": settings.seed}
