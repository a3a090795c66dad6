"""What a draft is worth in use: held-out prompts decoded by the engine, tokens counted, seconds measured."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from forerun.bench.prompts import encode, read_questions, whole
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import ParallelHeads, from_folder
from forerun.drafters.choose import behind_lookup
from forerun.engine import RowResult, Stats
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.repetition import repeated_share
from forerun.models.families import context_length
from forerun.prompts import rows_of, uses_template
from forerun.train.costs import StepCosts, weigh
from forerun.train.options import EvaluateOptions
from forerun.train.prompts import encode_reading, read_prompts
from forerun.train.report import ALL, evaluation_record


@dataclass(frozen=True, slots=True)
class CategorizedPrompt:
    """A prompt to decode."""

    tokens: tuple[int, ...]
    category: str


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
        costs = measure_costs(
            target, tokenizer, folder, [prompt.tokens for prompt in prompts[: options.timed]], options
        )
        if costs is None:
            reason = f"answers of at most {options.max_new_tokens} tokens are over before a draft can be timed"
            warnings.warn(f"costs were not measured: {reason}; raise max_new_tokens", ForerunWarning, stacklevel=2)
        else:
            details = {"costs": costs.as_dict(), "verdict": weigh(rows[0]["survival_by_position"], costs).as_dict()}
    settings = {"draft": folder.name, "source": source, "prompts": len(prompts), **asdict(options)}
    return evaluation_record(provenance, settings, rows, details)


def measure_costs(
    target: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    options: EvaluateOptions,
) -> StepCosts | None:
    """Greedy decoding of single prompts, plainly and with drafts; medians over the prompts after one to warm up.

    None where most answers end before a plain step, or before a draft.
    """
    plain = _timed(SpeculativeDecoder(target, None, tokenizer=tokenizer), prompts, options)
    drafter = from_folder(folder)
    decoder = SpeculativeDecoder(target, drafter, policy=options.draft_length, tokenizer=tokenizer)
    drafted = _timed(decoder, prompts, options)
    target_step = statistics.median(s.seconds.score / max(s.rounds, 1) for s in plain)
    draft_step = statistics.median(s.seconds.draft / max(s.num_draft_tokens, 1) for s in drafted)
    if not target_step or not statistics.median(s.num_draft_tokens for s in drafted):
        return None
    most = drafter.num_blocks if isinstance(drafter, ParallelHeads) else options.draft_length
    return StepCosts(
        target_step=target_step,
        draft_step=draft_step,
        block_step=statistics.median(s.seconds.score / max(s.rounds, 1) for s in drafted),
        draft_length=min(options.draft_length, most),
        all_at_once=isinstance(drafter, ParallelHeads),
    )


def _timed(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], options: EvaluateOptions) -> list[Stats]:
    length = min(options.max_new_tokens, 64)
    runs = [
        decoder.generate([list(prompt)], max_new_tokens=length, temperature=0.0, seed=0).stats
        for prompt in [prompts[0], *prompts]
    ]
    return runs[1:]


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
