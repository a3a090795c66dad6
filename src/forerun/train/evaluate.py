"""What a draft is worth in use: held-out prompts decoded by the engine, tokens counted, rounds timed."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from forerun.bench.prompts import encode, read_questions, whole
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import ParallelHeads, from_folder
from forerun.drafters.choose import behind_lookup
from forerun.engine import RowResult, Stats
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.theory import best_length
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.repetition import repeated_share
from forerun.models.families import context_length
from forerun.plan import costs as round_costs
from forerun.plan.costs import RoundCosts
from forerun.plan.rounds import EngineRunner, prompt_batches
from forerun.prompts import rows_of, uses_template
from forerun.train.options import EvaluateOptions
from forerun.train.prompts import encode_reading, read_prompts
from forerun.train.report import ALL, evaluation_record

TIMED_TOKENS, REPEATS = 64, 8  # new tokens of prompts whose rounds are timed, and rounds of each draft length


@dataclass(frozen=True, slots=True)
class CategorizedPrompt:
    """A prompt to decode."""

    tokens: tuple[int, ...]
    category: str


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """What acceptance and costs come to."""

    draft_length: int  # the best one; 0 where not drafting is best
    speedup: float  # over plain decoding, at that length

    @property
    def pays(self) -> bool:
        return self.draft_length > 0

    def __str__(self) -> str:
        if not self.pays:
            return "this will not pay: no draft length is faster than plain decoding here"
        return f"this will pay: {self.speedup:.2f} times plain decoding with drafts of {self.draft_length}"

    def as_dict(self) -> dict[str, Any]:
        return {"pays": self.pays, "draft_length": self.draft_length, "speedup": self.speedup, "text": str(self)}


def weigh(survival: Sequence[float], costs: RoundCosts) -> ExpectedSpeed:
    """`survival[i]` is the chance that token i + 1 of a draft and all before it are kept."""

    def seconds(length: int) -> float:
        return costs.of_round(length, length) if length else costs.plain

    length = best_length(survival, seconds)
    return ExpectedSpeed(length, (1 + sum(survival[:length])) * costs.plain / seconds(length))


def survival_of(acceptance: Sequence[float]) -> list[float]:
    """From the chance of each token where it is reached to the chance that all up to it are kept."""
    return list(accumulate(acceptance, operator.mul))


def read_prompts_by_category(path: Path, tokenizer: Any, limit: int | None = None) -> list[CategorizedPrompt]:
    """Prompts of a file, with their category where the rows have one (Spec-Bench's form); `limit` of each."""
    if _has_categories(path):
        questions = read_questions(path).items
        rows = zip(encode(tokenizer, questions), (whole(question.category) for question in questions), strict=True)
        prompts = [CategorizedPrompt(tokens, category) for tokens, category in rows]
    else:
        encoded, reading = encode_reading(read_prompts([path]), tokenizer, uses_template(tokenizer))
        if reading.complaint:
            warnings.warn(reading.complaint, ForerunWarning, stacklevel=2)
        prompts = [CategorizedPrompt(tokens, ALL) for tokens in encoded]
    if limit is None:
        return prompts
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def evaluate(
    target: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[CategorizedPrompt],
    options: EvaluateOptions,
    provenance: Provenance,
    source: str,
    report: Callable[[int], None] = lambda rows: None,
) -> Record:
    """Tokens per round, acceptance by position and repetition, overall and by category; costs; whether it will pay.

    `source` names the file of the prompts; `report` is told how many of them were decoded.
    """
    prompts = _fitting(prompts, target, options)
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        decoded = list(_decode(target, tokenizer, folder, prompts, options, temperature, report))
        rows += [{"temperature": temperature, **row} for row in _rows(prompts, decoded)]
    details: dict[str, Any] = {}
    if options.timed:
        costs = measure_costs(target, folder, [prompt.tokens for prompt in prompts[: options.timed]], options)
        details = {"costs": costs.facts(), "verdict": weigh(rows[0]["survival_by_position"], costs).as_dict()}
    settings = {"draft": folder.name, "source": source, "prompts": len(prompts), **asdict(options)}
    return evaluation_record(provenance, settings, rows, details)


def measure_costs(
    target: PreTrainedModel, folder: Path, prompts: Sequence[Sequence[int]], options: EvaluateOptions
) -> RoundCosts:
    """Greedy rounds of single prompts, plain ones and with drafts of one token and of as many as there will be."""
    drafter, most = from_folder(folder), options.draft_length
    if isinstance(drafter, ParallelHeads):
        most = min(most, drafter.num_blocks)
    runners = [EngineRunner("plain", target, None), EngineRunner("draft", target, drafter)]
    batches = prompt_batches(list(map(tuple, prompts)), 1, TIMED_TOKENS, most + 1, temperature=0.0, seed=0)
    return round_costs.measure_costs(runners[0], runners[1:], batches, sorted({1, most}), REPEATS)["draft"]


def _decode(
    target: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[CategorizedPrompt],
    options: EvaluateOptions,
    temperature: float,
    report: Callable[[int], None],
) -> Iterator[RowResult]:
    drafter = behind_lookup(from_folder(folder)) if options.lookup else from_folder(folder)
    decoder = SpeculativeDecoder(target, drafter, policy=options.draft_length, tokenizer=tokenizer)
    for start in range(0, len(prompts), options.batch_size):
        batch = [list(prompt.tokens) for prompt in prompts[start : start + options.batch_size]]
        result = decoder.generate(
            batch,
            max_new_tokens=options.max_new_tokens,
            temperature=temperature,
            seed=options.seed + start,  # rows count their random numbers within a call: another batch, another seed
        )
        report(len(batch))
        yield from result.rows


def _rows(prompts: Sequence[CategorizedPrompt], decoded: Sequence[RowResult]) -> list[dict[str, Any]]:
    """All prompts, and each category where there are several."""
    groups = {ALL: list(decoded)}
    names = dict.fromkeys(prompt.category for prompt in prompts)
    if len(names) > 1:
        for name in names:
            groups[name] = [row for prompt, row in zip(prompts, decoded, strict=True) if prompt.category == name]
    return [{"category": name, **_figures(rows)} for name, rows in groups.items()]


def _figures(rows: Sequence[RowResult]) -> dict[str, Any]:
    stats = Stats.total([row.stats for row in rows])
    return {
        "prompts": len(rows),
        "tokens": stats.num_emitted_tokens,
        "rounds": stats.rounds,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_by_position": stats.acceptance_by_position,
        "survival_by_position": [kept / max(stats.num_drafts, 1) for kept in stats.num_accepted_tokens_per_pos],
        "repeated_4grams": repeated_share([list(row.tokens) for row in rows]),
    }


def _fitting(
    prompts: Sequence[CategorizedPrompt], target: PreTrainedModel, options: EvaluateOptions
) -> list[CategorizedPrompt]:
    """Prompts that leave room for the answer in the target's context."""
    limit = context_length(target.config.get_text_config(decoder=True))
    fitting = [p for p in prompts if limit is None or len(p.tokens) + options.max_new_tokens <= limit]
    if not fitting:
        raise InvalidArgument(
            f"none of {len(prompts)} prompts leaves room for {options.max_new_tokens} tokens; shorten them"
        )
    return fitting


def _has_categories(path: Path) -> bool:
    """Whether the file is in Spec-Bench's form, by its first row."""
    _, first = next(rows_of(path), ("", None))
    return isinstance(first, dict) and "category" in first and "turns" in first
