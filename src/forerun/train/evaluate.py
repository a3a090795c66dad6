"""What a draft is worth in earnest: held-out prompts decoded by the engine, tokens counted, seconds measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forerun.bench.prompts import encode, read_questions, whole
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import ParallelHeads, from_folder
from forerun.drafters.base import Drafter
from forerun.drafters.choose import behind_lookup
from forerun.engine import RowResult, Stats
from forerun.errors import InvalidArgument
from forerun.files import parse_json, write_whole
from forerun.measure.repetition import repeated_share
from forerun.train.costs import StepCosts, weigh
from forerun.train.options import EvaluateOptions
from forerun.train.prompts import encode_prompts, read_prompts, uses_template

NAME = "eval.json"
ALL = "all"


@dataclass(frozen=True, slots=True)
class CategorizedPrompt:
    """A prompt to decode."""

    tokens: tuple[int, ...]
    category: str


def read_prompts_by_category(path: Path, tokenizer: Any, limit: int | None = None) -> list[CategorizedPrompt]:
    """Prompts of a file, with their category where the rows have one (Spec-Bench's form)."""
    if _has_categories(path):
        questions = read_questions(path)
        rows = zip(encode(tokenizer, questions.items), (whole(q.category) for q in questions.items), strict=True)
        found = [CategorizedPrompt(tokens, category) for tokens, category in rows]
    else:
        prompts = read_prompts([path]).prompts
        found = [
            CategorizedPrompt(ids, ALL) for ids in encode_prompts(tokenizer, prompts, uses_template(tokenizer, None))
        ]
    return found if limit is None else _first_of_each(found, limit)


def evaluate(
    target: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    asked: Sequence[CategorizedPrompt],
    options: EvaluateOptions,
    report: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """Tokens per round, acceptance by position and repetition, overall and by category; costs; whether it will pay."""
    asked = _fitting(asked, target, options)
    found: dict[str, Any] = {"draft": folder.name, "prompts": len(asked), "draft_length": options.draft_length}
    found["max_new_tokens"], found["lookup"] = options.max_new_tokens, options.lookup
    stats: Stats | None = None
    by_temperature = {}
    for temperature in options.temperatures:
        drafter = behind_lookup(from_folder(folder)) if options.lookup else from_folder(folder)
        rows = list(_decode(target, tokenizer, drafter, asked, options, temperature, report))
        by_temperature[f"{temperature:g}"] = _summary(asked, rows)
        stats = stats or Stats.total([row.stats for row in rows])
    found["temperatures"] = by_temperature
    if options.timed and stats is not None:
        costs = measure_costs(target, tokenizer, folder, [prompt.tokens for prompt in asked[: options.timed]], options)
        found["costs"] = costs.as_dict()
        found["verdict"] = weigh(survival(stats), costs).as_dict()
    return found


def save_evaluation(path: Path, found: dict[str, Any]) -> Path:
    write_whole(path, lambda beside: beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8"))
    return path


def measure_costs(
    target: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    options: EvaluateOptions,
) -> StepCosts:
    """Greedy decoding of single prompts, plainly and with drafts; medians over the prompts after one to warm up."""
    plain = _timed(SpeculativeDecoder(target, None, tokenizer=tokenizer), prompts, options)
    drafter = from_folder(folder)
    decoder = SpeculativeDecoder(target, drafter, policy=options.draft_length, tokenizer=tokenizer)
    drafted = _timed(decoder, prompts, options)
    return StepCosts(
        target_step=statistics.median(s.seconds.score / max(s.rounds, 1) for s in plain),
        draft_step=statistics.median(s.seconds.draft / max(s.num_draft_tokens, 1) for s in drafted),
        block_step=statistics.median(s.seconds.score / max(s.rounds, 1) for s in drafted),
        draft_length=options.draft_length,
        all_at_once=isinstance(drafter, ParallelHeads),
    )


def survival(stats: Stats) -> list[float]:
    """Chance that each token of a draft and all before it are kept."""
    return [kept / max(stats.num_drafts, 1) for kept in stats.num_accepted_tokens_per_pos]


def _timed(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], options: EvaluateOptions) -> list[Stats]:
    length = min(options.max_new_tokens, 64)
    runs = [
        decoder.generate(
            torch.tensor([list(prompt)], device=decoder.target.device), max_new_tokens=length, temperature=0.0, seed=0
        ).stats
        for prompt in [prompts[0], *prompts]
    ]
    return runs[1:]


def _decode(
    target: PreTrainedModel,
    tokenizer: Any,
    drafter: Drafter,
    asked: Sequence[CategorizedPrompt],
    options: EvaluateOptions,
    temperature: float,
    report: Callable[[int], None],
) -> Iterable[RowResult]:
    decoder = SpeculativeDecoder(target, drafter, policy=options.draft_length, tokenizer=tokenizer)
    for start in range(0, len(asked), options.batch_size):
        rows = [list(prompt.tokens) for prompt in asked[start : start + options.batch_size]]
        ids, mask = _padded(rows, target.device)
        keywords = {"max_new_tokens": options.max_new_tokens, "temperature": temperature}
        # Rows count their random numbers within a call: another batch needs another seed.
        result = decoder.generate(ids, mask, seed=options.seed + start, **keywords)  # type: ignore[arg-type]
        report(len(rows))
        yield from result.rows


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _summary(asked: Sequence[CategorizedPrompt], rows: Sequence[RowResult]) -> dict[str, Any]:
    """Overall, and by category where there are several."""
    names = list(dict.fromkeys(prompt.category for prompt in asked))
    groups = {name: [row for prompt, row in zip(asked, rows, strict=True) if prompt.category == name] for name in names}
    overall = _group(rows)
    return overall if len(names) < 2 else {**overall, "categories": {name: _group(groups[name]) for name in names}}


def _group(rows: Sequence[RowResult]) -> dict[str, Any]:
    stats = Stats.total([row.stats for row in rows])
    return {
        "prompts": len(rows),
        "tokens": stats.num_emitted_tokens,
        "rounds": stats.rounds,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_by_position": stats.acceptance_by_position,
        "survival_by_position": survival(stats),
        "repeated_4grams": repeated_share([list(row.tokens) for row in rows]),
    }


def _fitting(
    asked: Sequence[CategorizedPrompt], target: PreTrainedModel, options: EvaluateOptions
) -> list[CategorizedPrompt]:
    """Prompts that leave room for the answer in the target's context."""
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = None if limit is None else limit - options.max_new_tokens
    fitting = [prompt for prompt in asked if room is None or len(prompt.tokens) <= room]
    if not fitting:
        raise InvalidArgument(
            f"none of {len(asked)} prompts leaves room for {options.max_new_tokens} tokens; shorten them"
        )
    return fitting


def _first_of_each(asked: Sequence[CategorizedPrompt], limit: int) -> list[CategorizedPrompt]:
    seen: dict[str, int] = {}
    kept = []
    for prompt in asked:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def _has_categories(path: Path) -> bool:
    if path.suffix not in (".jsonl", ".ndjson"):
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = parse_json(file.readline())
    except (OSError, ValueError):
        return False  # the reader says what is wrong
    return isinstance(first, dict) and "category" in first and "turns" in first
