"""Spec-Bench's six categories: no gold answers, but how long they are, how much they repeat, and what drafts gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.prompts import whole
from forerun.eval.sandbox.run import ProgramLimits
from forerun.eval.tasks.rows import identity, json_rows, text
from forerun.eval.tasks.task import Answer, Example, Metric, Score, Task
from forerun.measure.repetition import repeated_share


def _example(row: Mapping[str, Any]) -> Example:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError("turns must be a list that begins with a text")
    name = identity(row, "question_id", otherwise=turns[0])
    return Example(name, turns[0], None, whole(text(row, "category")))


def _facts(example: Example, answer: Answer, limits: ProgramLimits) -> Score:
    return Score({"repeated": repeated_share([answer.tokens]), "tokens": float(len(answer.tokens))})


SPEC_BENCH = Task(
    name="spec_bench",
    title="Spec-Bench",
    metrics=(
        Metric("repeated", "repeated 4-grams"),
        Metric("tokens", "tokens", is_share=False),
    ),
    places=(("spec_bench/question.jsonl",), ("question.jsonl",)),
    parse=json_rows(_example),
    give="Spec-Bench's question.jsonl",
    score=_facts,
)
