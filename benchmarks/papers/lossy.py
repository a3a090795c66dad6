"""What the tables of lossy rules share: a real run under a rule, and what it does to the text."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.papers.pairs import Pair
from benchmarks.papers.scores import answers
from benchmarks.papers.tasks import Task
from forerun.checks import base as checks
from forerun.checks.divergence import measure_divergence
from forerun.config import SamplingParams
from forerun.engine import Stats
from forerun.math.lossy import LossyRule
from forerun.measure.rounds import decode
from forerun.policy import Constant
from forerun.rules import AnyRule

BATCH = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What is decoded, and how."""

    pair: Pair
    task: Task
    tokens: int
    sampling: Mapping[str, Any]
    seed: int


def run(work: Work, rule: AnyRule, length: int) -> dict[str, Any]:
    """Decode all prompts under a rule: how much was kept, and how the text reads."""
    decoder = work.pair.decoder(work.pair.main, Constant(length), rule=rule)
    prompts, stats, outputs, seconds = work.task.prompts, [], [], 0.0
    for start in range(0, len(prompts), BATCH):
        keywords = {"max_new_tokens": work.tokens, "seed": work.seed + start, **work.sampling}
        trace = decode(decoder, prompts[start : start + BATCH], **keywords)
        stats.append(trace.stats)
        outputs += trace.result.new_tokens
        seconds += trace.seconds
    total = Stats.total(stats)
    return {
        "lossy": total.lossy,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_call": total.tokens_per_round,
        "tokens_per_second": total.num_emitted_tokens / seconds if seconds else None,
        "surprise": fmean(surprise(work.pair.target, p, o) for p, o in zip(prompts, outputs, strict=True)),
        "rouge1": rouge1(work, outputs),
    }


@torch.inference_mode()
def surprise(target: Any, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Mean -log p of a text under the target, in nats a token: word salad surprises, text of the target's own less."""
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    logits = target(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    log_p = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])
    return -float(log_p.mean())


def rouge1(work: Work, outputs: Sequence[Sequence[int]]) -> float | None:
    """Mean ROUGE-1 F, the paper's measure; None without references or without rouge-score."""
    references = [item.reference for item in work.task.items]
    if work.pair.tokenizer is None or None in references or importlib.util.find_spec("rouge_score") is None:
        return None
    from rouge_score import rouge_scorer  # type: ignore[import-untyped]

    scorer = rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)
    pairs = zip(references, answers(work.pair.tokenizer, outputs), strict=True)
    return fmean(scorer.score(reference, answer)["rouge1"].fmeasure for reference, answer in pairs)


def divergences(work: Work, rules: Sequence[LossyRule], length: int, prompts: int) -> dict[str, dict[str, Any]]:
    """How far each rule's law lies from the target's, along the target's own texts; `token` is the control."""
    options = {"tokenizer": work.pair.tokenizer}
    pair = checks.CheckedPair(work.pair.target, work.pair.drafters[work.pair.main](), length, options=options)
    params = SamplingParams(**work.sampling)
    by_rule = measure_divergence(
        pair, work.task.prompts[:prompts], rules, params, max_new_tokens=work.tokens, seed=work.seed
    )
    return {name: divergence.as_dict() for name, divergence in by_rule.items()}


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
