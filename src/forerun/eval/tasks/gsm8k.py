"""GSM8K: sums in words; the last number of the answer must be the right one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from forerun.eval.sandbox.run import ProgramLimits
from forerun.eval.tasks.rows import identity, json_rows, text
from forerun.eval.tasks.task import Answer, Example, Metric, Score, Task

MARK = "####"
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def last_number(answer: str) -> Decimal | None:
    """The number after the last `####` where there is one, else the last number of the text."""
    marked = NUMBER.search(answer.rpartition(MARK)[2]) if MARK in answer else None
    digits = marked.group() if marked else next(reversed(NUMBER.findall(answer)), None)
    if digits is None:
        return None
    try:
        return Decimal(digits.replace(",", ""))
    except InvalidOperation:
        return None


def exact_match(example: Example, answer: Answer, limits: ProgramLimits) -> Score:
    said = last_number(answer.text)
    right = said is not None and said == Decimal(example.reference)
    return Score({"exact_match": float(right)}, "no number" if said is None else f"said {said}")


def _example(row: Mapping[str, Any]) -> Example:
    question, answer = text(row, "question"), text(row, "answer")
    number = last_number(answer)
    if number is None:
        raise ValueError("answer holds no number; it should end in '#### 42'")
    return Example(identity(row, "id", otherwise=question), question, str(number))


def _ask(example: Example, chat: bool) -> str:
    if chat:
        return (
            f"{example.text}\n\nSolve it step by step. Write the final number alone on the last line, after '{MARK} '."
        )
    return f"Question: {example.text}\nAnswer:"


GSM8K = Task(
    name="gsm8k",
    title="GSM8K",
    metrics=(Metric("exact_match", "exact match"),),
    places=(("gsm8k/test.jsonl",), ("gsm8k.jsonl",)),
    parse=json_rows(_example),
    give="test.jsonl of GSM8K, with the fields question and answer",
    ask=_ask,
    score=exact_match,
    max_new_tokens=192,
    stops=("\nQuestion:",),
    is_pass=True,
)
