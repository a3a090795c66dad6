"""What the models are asked: the papers' own tasks where the data folder has them, else prompts of our own."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.prompts import Question, built_in, encode, find_questions
from forerun.config import data_folder
from forerun.errors import InvalidArgument
from forerun.eval.tasks.code import HUMANEVAL as HUMANEVAL_TASK
from forerun.eval.tasks.task import Example

XSUM = "summarization/xsum-1000.jsonl"
HUMANEVAL = "humaneval/HumanEval.jsonl.gz"
WIKITEXT = "wikitext2/valid.txt"
WORDS = 160  # of an article: its prompt is read in a second or two on a small machine


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, and what somebody thinks is a good answer."""

    tokens: tuple[int, ...]
    reference: str | None = None
    program: Example | None = None  # what an answer goes on with, and the tests that it should pass


@dataclass(frozen=True, slots=True)
class Task:
    """Some items, and where they come from."""

    name: str
    source: str
    items: tuple[Item, ...]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [item.tokens for item in self.items]


def find_task(name: str, tokenizer: Any, count: int, seed: int = 0) -> Task:
    """`xsum`, `humaneval` or a category of Spec-Bench, `count` items of it, drawn by `seed`."""
    find = {"xsum": _xsum, "humaneval": _humaneval}.get(name)
    return find(tokenizer, count, seed) if find else _category(name, tokenizer, count, seed)


def random_task(name: str, vocab_size: int, count: int, length: int = 64, seed: int = 0) -> Task:
    """For models that speak no language."""
    numbers = random.Random(f"{name} {seed}")
    items = tuple(Item(tuple(numbers.randrange(vocab_size) for _ in range(length))) for _ in range(count))
    return Task(name, f"{length} random token ids a prompt", items)


def corpus(tokenizer: Any) -> tuple[str, list[list[int]]]:
    """Text to count n-grams in: WikiText-2's validation part, else Forerun's own prompts."""
    path = _in_data(WIKITEXT)
    if path is not None:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return f"WikiText-2 {path.name}", tokenizer(lines, add_special_tokens=False)["input_ids"]
    texts = built_in()
    return texts.source, [list(tokens) for tokens in encode(tokenizer, texts.items)]


def _xsum(tokenizer: Any, count: int, seed: int) -> Task:
    path = _in_data(XSUM)
    if path is None:
        return _category("summarization", tokenizer, count, seed)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = _some([row for row in rows if len(row["document"].split()) > 40], count, seed, path.name)
    texts = [f"Summarize this article in one sentence: {_beginning(row['document'])}" for row in rows]
    prompts = encode(tokenizer, [Question("xsum", text) for text in texts])
    items = [Item(tokens, row["summary"]) for tokens, row in zip(prompts, rows, strict=True)]
    return Task("xsum", f"{path.name}, articles cut to {WORDS} words", tuple(items))


def _humaneval(tokenizer: Any, count: int, seed: int) -> Task:
    path = _in_data(HUMANEVAL)
    if path is None:
        return _category("mt_bench", tokenizer, count, seed)
    examples = _some(list(HUMANEVAL_TASK.read(data_folder()).examples), count, seed, path.name)
    items = [Item(tuple(tokenizer(example.text)["input_ids"]), program=example) for example in examples]
    return Task("humaneval", path.name, tuple(items))


def _category(name: str, tokenizer: Any, count: int, seed: int) -> Task:
    questions = find_questions()
    asked = sorted(questions.of(name), key=lambda question: len(question.text))
    short = asked[: max(8, len(asked) * 3 // 4)]  # the longest take long to read and say nothing new here
    tokens = encode(tokenizer, _some(short, count, seed, questions.source))
    return Task(name, questions.source, tuple(Item(prompt) for prompt in tokens))


def _some(rows: list[Any], count: int, seed: int, source: str) -> list[Any]:
    if len(rows) < count:
        raise InvalidArgument(f"{source} has {len(rows)} prompts that fit and {count} are needed; give more data")
    return random.Random(seed).sample(rows, count)


def _beginning(document: str) -> str:
    return " ".join(document.split()[:WORDS])


def _in_data(name: str) -> Path | None:
    folder = data_folder()
    return folder / name if folder is not None and (folder / name).is_file() else None
