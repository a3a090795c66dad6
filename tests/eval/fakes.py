"""Data folders in small, decoders with scripted answers, a tokenizer of characters."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.eval.methods import PLAIN, SPECULATIVE, AnsweredCall, IndexedPrompt
from forerun.eval.tasks import Answer

# (way, index of the example, copy) -> answer
Script = Callable[[str, int, int], str]
DOCUMENT = "The river runs through the old town and the people walk along it every evening in spring. "


class Letters:
    """Every character is a token."""

    chat_template = None

    def __call__(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
        if isinstance(text, list):
            return {"input_ids": [self(one)["input_ids"] for one in text]}
        return {"input_ids": [ord(letter) % 256 for letter in text]}


class FakeWay:
    """Answers by script; may be told to fail at a call."""

    def __init__(self, name: str, script: Script, *, fail_at: int | None = None, error: type[BaseException] = OSError):
        self.name, self.script, self.fail_at, self.error = name, script, fail_at, error
        self.calls: list[list[int]] = []

    def answer(self, asked: Sequence[IndexedPrompt], keywords: dict[str, Any]) -> AnsweredCall:
        if self.fail_at is not None and len(self.calls) >= self.fail_at:
            raise self.error("killed")
        self.calls.append([one.index for one in asked])
        copies = keywords.get("num_return_sequences", 1)
        prompts = tuple(tuple(self._answer(one.index, copy) for copy in range(copies)) for one in asked)
        return AnsweredCall(float(len(asked)), prompts)

    def _answer(self, index: int, copy: int) -> Answer:
        text = self.script(self.name, index, copy)
        tokens = tuple(map(ord, text))
        return Answer(text, tokens, "stop", 1.0 + copy, -0.1 * (copy + 1), max(len(tokens), 1), 4, 2)


def fake_ways(script: Script, **more: Any) -> tuple[FakeWay, FakeWay]:
    return FakeWay(PLAIN, script), FakeWay(SPECULATIVE, script, **more)


def write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sums(folder: Path, count: int) -> None:
    """GSM8K in small: the answer to example i is i."""
    rows = [{"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(count)]
    write_jsonl(folder / "gsm8k/test.jsonl", rows)


def small_data(folder: Path) -> Path:
    """A few rows of every task."""
    sums(folder, 4)
    documents = [{"id": i, "document": DOCUMENT + str(i), "summary": "A river in a town."} for i in range(3)]
    write_jsonl(folder / "summarization/xsum.jsonl", documents)
    write_jsonl(folder / "cnn_dailymail.jsonl", [{"article": DOCUMENT, "highlights": "A river."}])
    program = {
        "task_id": "H/0",
        "prompt": "def one():\n",
        "entry_point": "one",
        "test": "def check(f): assert f() == 1",
    }
    (folder / "humaneval").mkdir()
    (folder / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(program).encode()))
    write_jsonl(folder / "mbpp/mbpp.jsonl", [
        {"task_id": 11, "text": "Write one.", "test_list": ["assert one() == 1"], "test_setup_code": ""},
        {"task_id": 601, "text": "Not of the test split.", "test_list": ["assert 1"]},
    ])  # fmt: skip
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2/test.txt").write_text(DOCUMENT * 3)
    questions = [
        {"question_id": i, "category": name, "turns": ["Why?"]} for i, name in enumerate(("qa", "rag", "coding"))
    ]
    write_jsonl(folder / "spec_bench/question.jsonl", questions)
    return folder
