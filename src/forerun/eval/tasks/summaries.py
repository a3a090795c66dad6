"""XSum and CNN/DailyMail: summaries, scored by ROUGE-1, ROUGE-2 and ROUGE-L (F-measure, stemmed)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from forerun.eval.sandbox.run import ProgramLimits
from forerun.eval.tasks.rows import identity, json_rows, line_pairs, text
from forerun.eval.tasks.task import Answer, Example, Metric, Rows, Score, Task

ROUGES = {"rouge2": "ROUGE-2", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}
METRICS = tuple(Metric(name, title) for name, title in ROUGES.items())
SENTENCE_TAGS = re.compile(r"\s*</?t>\s*")


def rouge(example: Example, answer: Answer, limits: ProgramLimits) -> Score:
    scores = _scorer().score(str(example.reference), answer.text)
    return Score({name: float(scores[name].fmeasure) for name in ROUGES})


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGES), use_stemmer=True)


def _from_json(row: Mapping[str, Any]) -> Example:
    document = text(row, "document", "article", "text")
    return Example(identity(row, "id", otherwise=document), document, text(row, "summary", "highlights"))


def _from_lines(number: str, document: str, reference: str) -> Example:
    return Example(number, document, " ".join(SENTENCE_TAGS.sub(" ", reference).split()))


def _parse(paths: tuple[Path, ...]) -> Rows:
    kind = line_pairs(_from_lines) if paths[0].suffix == ".txt" else json_rows(_from_json)
    return kind(paths)


def _asking(how: str) -> Any:
    def ask(example: Example, chat: bool) -> str:
        if chat:
            return f"Summarize the following article in {how}.\n\n{example.text}"
        return f"{example.text}\n\nSummary of the article in {how}:"

    return ask


XSUM = Task(
    name="xsum",
    title="XSum",
    metrics=METRICS,
    places=(
        ("summarization/xsum-1000.jsonl",),
        ("summarization/xsum.jsonl",),
        ("xsum.jsonl",),
        ("summarization/pyrxsum_documents.txt", "summarization/pyrxsum_references.txt"),
        ("summarization/hf_xsum_sample.json",),
    ),
    parse=_parse,
    give="a JSONL file with the fields document and summary",
    ask=_asking("one sentence"),
    score=rouge,
    max_new_tokens=64,
    stops=("\n",),
    needs="rouge_score",
    reads_document=True,
)
CNN_DAILYMAIL = Task(
    name="cnn_dailymail",
    title="CNN/DailyMail",
    metrics=METRICS,
    places=(
        ("summarization/cnn_dailymail.jsonl",),
        ("cnn_dailymail.jsonl",),
        ("summarization/realsumm_cnndm_documents.txt", "summarization/realsumm_cnndm_references.txt"),
    ),
    parse=_parse,
    give="a JSONL file with the fields article and highlights",
    ask=_asking("three sentences"),
    score=rouge,
    max_new_tokens=128,
    stops=("\n\n",),
    needs="rouge_score",
    reads_document=True,
)
