"""Scores of answers, where their libraries are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from forerun.eval.sandbox.run import ProgramLimits
from forerun.eval.tasks.code import HUMANEVAL
from forerun.eval.tasks.task import Answer, Example


def rouge2(tokenizer: Any, outputs: Sequence[Sequence[int]], references: Sequence[str | None]) -> float | None:
    """Mean ROUGE-2 F of the answers, each up to its end token; None without references or without rouge-score."""
    if tokenizer is None or None in references or importlib.util.find_spec("rouge_score") is None:
        return None
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)
    pairs = zip(references, answers(tokenizer, outputs), strict=True)
    return fmean(scorer.score(reference, answer)["rouge2"].fmeasure for reference, answer in pairs)


def passes(tokenizer: Any, output: Sequence[int], program: Example | None) -> float | None:
    """Whether a program passes its tests, as 1 or 0; None where there are none, or nothing to read it with."""
    if tokenizer is None or program is None:
        return None
    text = answers(tokenizer, [output])[0]
    ends = [place for stop in HUMANEVAL.stops if (place := text.find(stop)) >= 0]
    answer = Answer(text[: min(ends, default=len(text))], tuple(output))
    return HUMANEVAL.score(program, answer, ProgramLimits()).values["pass"]


def answers(tokenizer: Any, outputs: Sequence[Sequence[int]]) -> list[str]:
    """As text, up to the end token: measurements go on after it."""
    return [tokenizer.decode(_ended(output, tokenizer.eos_token_id), skip_special_tokens=True) for output in outputs]


def _ended(output: Sequence[int], end: int | None) -> list[int]:
    tokens = list(output)
    return tokens[: tokens.index(end)] if end in tokens else tokens
