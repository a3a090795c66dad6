"""BASS (Qian et al.), Figure 5 in shape: answers within a time budget, one shown first, the others behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.papers.common import Setup, Steps, markdown, paper_figure, record_path, sentences, store
from benchmarks.papers.pairs import Pair, open_pair
from forerun import SpeculativeDecoder
from forerun.bench.prompts import Question, encode
from forerun.engine import FinishReason
from forerun.errors import InvalidArgument
from forerun.measure.plot import BLACK, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.rounds import decode
from forerun.result import GenerateResult

TITLE = "Answers within a time budget (BASS, Figure 5)"
BATCHES = (1, 2, 4, 8)
TOKENS = 32
TEMPERATURE = 0.4
BRIEFLY = " Answer with one word."  # or a small model talks about the question
SHARE = 0.7
"""The budget is that part of the time of one plain row of TOKENS; the paper's 2.5 s are 0.68 of its 256 tokens'."""
METHODS = ("plain", "speculative")
QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", r"\bParis\b"),
    ("What is the capital of Japan?", r"\bTokyo\b"),
    ("What is the capital of Italy?", r"\bRome\b"),
    ("What is the capital of Australia?", r"\bCanberra\b"),
    ("What is 7 plus 5?", r"\b(12|twelve)\b"),
    ("What is 9 minus 4?", r"\b(5|five)\b"),
    ("What is 6 times 7?", r"\b(42|forty-two)\b"),
    ("How many days does a week have?", r"\b(7|seven)\b"),
    ("How many legs does a spider have?", r"\b(8|eight)\b"),
    ("Which planet is known as the Red Planet?", r"\bMars\b"),
    ("What is the chemical formula of water?", r"\bH(2|₂)O\b"),
    ("Who wrote the play Hamlet?", r"\bShakespeare\b"),
    ("What is the opposite of hot?", r"\bcold\b"),
    ("Which animal says meow?", r"\bcats?\b"),
    ("At how many degrees Celsius does water boil?", r"\b100\b"),
    ("Which language is spoken in Brazil?", r"\bPortuguese\b"),
)
"""Questions a model of 135 million parameters can answer sometimes, and what a right answer contains."""


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    if pair.tokenizer is None:
        raise InvalidArgument(f"pair {pair.name!r} speaks no language, and answers must be scored; use --pair embedded")
    questions = setup.choose(QUESTIONS, QUESTIONS[:2])
    batches = setup.choose(BATCHES, (1, 2))
    decoders = dict(zip(METHODS, (pair.decoder(None), pair.decoder(pair.main)), strict=True))
    asked = list(
        zip(questions, encode(pair.tokenizer, [Question("own", q + BRIEFLY) for q, _ in questions]), strict=True)
    )
    seconds = budget(decoders["plain"], asked[0][1])
    for decoder in decoders.values():
        answer(decoder, asked[0][1], batches[-1], seconds, setup.seed)
    steps = Steps(len(batches) * len(asked))
    rows = []
    for batch in batches:
        for (question, right), prompt in asked:
            steps.step(f"batch {batch}: {question}")
            for name, decoder in decoders.items():
                result = answer(decoder, prompt, batch, seconds, setup.seed)
                rows.append(
                    {"method": name, "batch": batch, "question": question, **score_answers(pair, result, right)}
                )
    steps.end()
    settings = {
        "seconds": round(seconds, 2),
        "new tokens": TOKENS,
        "temperature": TEMPERATURE,
        "questions": len(questions),
        **pair.about,
    }
    return store("service", setup, pair.device, settings, {"rows": rows}, path or record_path("service", pair.name))


def budget(plain: SpeculativeDecoder, prompt: Sequence[int]) -> float:
    """Seconds in which a plain row would get SHARE of its tokens, its prompt included."""
    decode(plain, [prompt], max_new_tokens=8)
    trace = decode(plain, [prompt], max_new_tokens=TOKENS // 2)
    step = trace.seconds / len(trace.rounds)
    return SHARE * TOKENS * step + trace.result.seconds - TOKENS // 2 * step


def answer(decoder: SpeculativeDecoder, prompt: Sequence[int], batch: int, seconds: float, seed: int) -> GenerateResult:
    return decoder.generate(
        torch.tensor([list(prompt)], device=decoder.target.device), num_return_sequences=batch, max_time=seconds,
        max_new_tokens=TOKENS, temperature=TEMPERATURE, top_p=0.95, seed=seed, logprobs=0,
    )  # fmt: skip


def score_answers(pair: Pair, result: GenerateResult, right: str) -> dict[str, Any]:
    """Whether the answer shown first is right, and whether any finished one is; unfinished ones are not shown."""
    done = [row for row in result.ranking[0] if result.finish_reasons[row] is not FinishReason.TIME]
    texts = [pair.tokenizer.decode(result.new_tokens[row], skip_special_tokens=True) for row in done]
    passed = [re.search(right, text) is not None for text in texts]
    return {
        "finished": len(done),
        "first": bool(passed and passed[0]),
        "any": any(passed),
        "seconds": result.seconds,
    }


def shares(record: Record, method: str, batch: int) -> dict[str, float]:
    rows = [r for r in record.details["rows"] if r["method"] == method and r["batch"] == batch]
    return {key: fmean(float(row[key]) for row in rows) for key in ("finished", "first", "any", "seconds")}


def batches_of(record: Record) -> list[int]:
    return sorted({row["batch"] for row in record.details["rows"]})


def figure(record: Record) -> Figure:
    batches = batches_of(record)
    x = tuple(map(float, batches))
    passes, finished = [], []
    for method, colour, marker in zip(METHODS, (BLACK, RED), "so", strict=True):
        by_batch = [shares(record, method, batch) for batch in batches]
        first, any_, ended = (tuple(share[key] for share in by_batch) for key in ("first", "any", "finished"))
        passes.append(Series(f"{method}, shown first", x, first, colour=colour, dashes="--", marker=marker))
        passes.append(Series(f"{method}, any finished", x, any_, colour=colour, marker=marker))
        finished.append(Series(method, x, tuple(n / b for n, b in zip(ended, batches, strict=True)), colour=colour))
    within = f"within {record.settings['seconds']} s"
    return paper_figure(
        "As a service",
        record,
        Panel(within, "sequences a question", "share of questions answered rightly", tuple(passes), x),
        Panel("in time", "sequences a question", "share of rows that finished", tuple(finished), x),
    )


def render(record: Record) -> list[str]:
    rows = [
        (method, str(batch), f"{counts['first']:.0%}", f"{counts['any']:.0%}", f"{counts['finished'] / batch:.0%}")
        for method in METHODS
        for batch in batches_of(record)
        for counts in (shares(record, method, batch),)
    ]
    headings = ("method", "sequences", "right, shown first", "right, any finished", "rows finished")
    return [*markdown(headings, rows), "", *_verdict(record)]


def _verdict(record: Record) -> list[str]:
    batches, methods, settings = batches_of(record), list(METHODS), record.settings
    few, many = (shares(record, methods[1], batch) for batch in (batches[0], batches[-1]))
    plain = shares(record, methods[0], batches[-1])
    return sentences(
        f"{settings['questions']} short questions of our own, {settings['seconds']} s each (the paper's budget, in "
        "terms of what a plain row takes): a model of this size solves next to no problem of HumanEval.",
        "The first answer shown is the one of the best mean log-probability.",
        f"From {batches[0]} to {batches[-1]} sequences, right answers among the finished go from {few['any']:.0%} to "
        f"{many['any']:.0%}, those shown first from {few['first']:.0%} to {many['first']:.0%}; the paper's rise from "
        "the mid-thirties to 61 % and 43 %.",
        _held(few, many),
        f"At {batches[-1]} sequences {many['finished'] / batches[-1]:.0%} of the rows finish in time with drafts, "
        f"{plain['finished'] / batches[-1]:.0%} without.",
        "`forerun eval` scores real tasks this way.",
    )


def _held(few: Mapping[str, float], many: Mapping[str, float]) -> str:
    if many["any"] > few["any"] and many["first"] > few["first"]:
        return "Both rise here too."
    if many["any"] > few["any"]:
        return "More sequences help whoever looks at all of them; ranking by the model's own confidence does not."
    return "Neither rises here."
