"""`forerun bench`: every method decodes a group of prompts before the next group begins: drift hits all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun.bench.builtin import BUILT_IN
from forerun.bench.methods import METHODS, Bench, Method, Run, check_methods, default_methods, same_law
from forerun.bench.prompts import Question, Questions, encode, find_questions, pools
from forerun.bench.report import make_record
from forerun.bench.results import Measurement, Refusal, Results
from forerun.bench.schedule import Group, Schedule, Speed, make_schedule
from forerun.bench.settings import CompareSettings
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.reference import Agreement, compare_texts
from forerun.measure.repetition import repeated_share
from forerun.measure.turns import Outcome, Turn, take_turns

WARM_UP_TOKENS = 16
QUICK: dict[str, Any] = {
    "categories": ("mt_bench", "summarization", "math_reasoning"),
    "batch_sizes": (1, 4),
    "prompts_per_category": 1,
    "max_new_tokens": 64,
}
"""What `--quick` changes, where nothing else was asked for: about two minutes instead of a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was asked for, checked as far as possible without loading a model."""

    settings: CompareSettings
    questions: Questions
    model: str
    draft: str | None


def check(
    *,
    model: str,
    draft: str | None = None,
    data: Path | None = None,
    methods: Sequence[str] | None = None,
    quick: bool = False,
    **chosen: Any,
) -> Comparison:
    """Refuse whatever can be refused now. `chosen` are fields of `CompareSettings`; None stands for the default."""
    names = check_methods(methods, draft is not None) if methods else default_methods(draft is not None)
    fields = {**(QUICK if quick else {}), **{name: value for name, value in chosen.items() if value is not None}}
    settings = CompareSettings(
        model=without_folders(model), draft=without_folders(draft) if draft else None, methods=names, **fields
    )
    questions = find_questions(data)
    for category in settings.categories:
        questions.of(category)
    return Comparison(settings, questions, model, draft)


def load_and_run(asked: Comparison, output: Path, reporter: Reporter, command: Sequence[str], **where: Any) -> Record:
    """Load, measure, store. `where` goes to `load_model`: device, dtype."""
    from forerun.loading import load_model

    settings = asked.settings
    if asked.questions.note:
        reporter.say(asked.questions.note)
    reporter.start(f"loading {settings.model}")
    target, tokenizer = load_model(asked.model, **where)
    draft, draft_tokenizer = load_model(asked.draft, **where) if asked.draft else (None, None)
    bench = Bench(
        target, tokenizer, settings.temperature, settings.seed, draft, draft_tokenizer,
        kernels=settings.kernels, rule=settings.rule,
    )  # fmt: skip
    return run(settings, bench, asked.questions, output, reporter, command)


def run(
    settings: CompareSettings,
    bench: Bench,
    questions: Questions,
    output: Path,
    reporter: Reporter,
    command: Sequence[str],
    methods: Sequence[Method] | None = None,
) -> Record:
    """Measure, and store after every call. After Ctrl-C the record says that it is incomplete."""
    with same_law(bench.target, bench.draft):
        methods = methods or [METHODS[name](bench) for name in settings.methods]
        results = Results(
            provenance(bench.target.device, command),
            asdict(settings) | {"prompts": questions.source, "end_token": "ignored"},
            titles={method.name: method.title for method in methods},
            refusals=tuple(
                Refusal(method.name, batch, reason)
                for batch in settings.batch_sizes
                for method in methods
                if (reason := method.refusal(batch)) is not None
            ),
        )
        try:
            schedule = prepare(settings, bench, questions, methods, reporter)
        except KeyboardInterrupt:
            return make_record(results, complete=False)
        results.notes = schedule.notes
        results.settings["prompts_per_category"] = schedule.prompts_per_category
        results.settings["categories"] = list(dict.fromkeys(group.category for group in schedule.groups))
        results.settings["expected_seconds"] = round(schedule.total_seconds, 1)

        def save(outcome: Outcome) -> Record:
            record = make_record(results, outcome.complete)
            if results.measurements:
                record.save(output)
            return record

        return take_turns(_turns(schedule, methods, settings, bench, results.measurements), reporter, save)


def prepare(
    settings: CompareSettings, bench: Bench, questions: Questions, methods: Sequence[Method], reporter: Reporter
) -> Schedule:
    """Warm up every method at every batch size, and choose groups by how fast the baseline turned out to be."""
    speeds = warm_up(settings, bench, methods, reporter)
    prompts = pools(questions, settings.categories or questions.categories, bench.tokenizer, _room(settings, bench))
    schedule = make_schedule(
        prompts,
        settings.batch_sizes,
        settings.prompts_per_category,
        cost=lambda group: speeds[group.batch].call(group, settings.max_new_tokens),
        turns=lambda group: settings.repeats * sum(method.refusal(group.batch) is None for method in methods),
        budget=60 * settings.minutes,
    )
    if not schedule.groups:
        raise InvalidArgument("no prompts are left to measure: " + "; ".join(schedule.notes))
    reporter.say(
        f"{len(schedule.groups)} groups of prompts, {schedule.prompts_per_category} prompts a category: about "
        f"{schedule.total_seconds / 60:.1f} minutes (if every method were as fast as model.generate)"
    )
    return schedule


def warm_up(settings: CompareSettings, bench: Bench, methods: Sequence[Method], reporter: Reporter) -> dict[int, Speed]:
    """The first call of a shape pays for allocations and thread pools. The baseline's also show its speed."""
    texts = [text for row in zip(*BUILT_IN.values(), strict=True) for text in row]
    speeds = {}
    for batch in settings.batch_sizes:
        asked = [Question("warm-up", f"{texts[i % len(texts)]} ({i})") for i in range(batch)]
        prompts = encode(bench.tokenizer, asked)
        group = Group("warm-up", 0, tuple(prompt[: _room(settings, bench)] for prompt in prompts))
        for place, method in enumerate(methods):
            if method.refusal(batch) is None:
                reporter.start(f"warming up: batch {batch}, {method.title}")
                method.run(group.prompts, WARM_UP_TOKENS)
                if place == 0:
                    speeds[batch] = _speed(method, group)
    return speeds


def _turns(
    schedule: Schedule, methods: Sequence[Method], settings: CompareSettings, bench: Bench, measured: list[Measurement]
) -> list[Turn]:
    """A B C on the first group, A B C on the second ...; the first method's text is what the others' is held to."""
    expected: dict[tuple[int, int], Run] = {}

    def one(method: Method, place: int, repeat: int) -> None:
        group = schedule.groups[place]
        done = method.run(group.prompts, settings.max_new_tokens)
        baseline = expected.get((repeat, place))
        agreement = None
        if baseline is None:
            expected[(repeat, place)] = done
        elif settings.temperature == 0:  # sampled texts differ by chance
            agreement = compare_texts(bench.target, group.prompts, baseline.tokens, done.tokens)
        measured.append(_measurement(method, group, repeat, done, agreement))

    return [
        Turn(
            f"batch {group.batch}, {group.category}, {method.title}",
            partial(one, method, place, repeat),
            schedule.seconds[place],
        )
        for repeat in range(settings.repeats)
        for place, group in enumerate(schedule.groups)
        for method in methods
        if method.refusal(group.batch) is None
    ]


def _measurement(method: Method, group: Group, repeat: int, done: Run, agreement: Agreement | None) -> Measurement:
    return Measurement(
        method=method.name,
        batch=group.batch,
        category=group.category,
        group=group.index,
        repeat=repeat,
        seconds=done.seconds,
        prompt_tokens=group.prompt_tokens,
        new_tokens=sum(map(len, done.tokens)),
        rounds=done.rounds,
        drafted=done.drafted,
        accepted=done.accepted,
        repeated=repeated_share(done.tokens),
        agreement=agreement,
        phases=done.phases,
    )


def _speed(method: Method, group: Group) -> Speed:
    first = method.run(group.prompts, 1).seconds
    more = method.run(group.prompts, 1 + WARM_UP_TOKENS // 2).seconds
    return Speed(first / group.padded_tokens, max(more - first, 0.0) / (WARM_UP_TOKENS // 2))


def _room(settings: CompareSettings, bench: Bench) -> int | None:
    """Tokens a prompt may have, so that the output still fits the context."""
    context: Any = getattr(bench.target.config, "max_position_embeddings", None)
    return None if context is None else context - settings.max_new_tokens
