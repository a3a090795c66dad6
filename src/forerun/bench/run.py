"""The comparison: every contender decodes a group before the next group begins, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from forerun.bench.builtin import BUILT_IN
from forerun.bench.methods import CONTENDERS, Bench, Contender, Run, same_law
from forerun.bench.outputs import compare as compare_outputs
from forerun.bench.outputs import repeated_share
from forerun.bench.plan import Group, Plan, Speed, plan
from forerun.bench.prompts import Question, Questions, encode, pools
from forerun.bench.records import Agreement, Measurement, Record, Refusal
from forerun.config import kernels
from forerun.errors import InvalidArgument
from forerun.measure.provenance import Provenance, provenance
from forerun.rules import parse

WARM_UP_TOKENS = 16
Judge = Callable[[Group, Run, Run], Agreement | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    model: str = "embedded"
    draft: str | None = None
    methods: tuple[str, ...]
    categories: tuple[str, ...] = ()  # none: all there are
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    prompts_per_category: int | None = None  # None: as many as fit `minutes`
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    rule: str = "token"  # of Forerun's contenders; see `forerun.rules`
    repeats: int = 1
    minutes: float = 15.0
    kernels: str = field(default_factory=kernels)  # what $FORERUN_KERNELS says, unless something else was asked for

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "prompts_per_category"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidArgument(f"{name}={value}: must be at least 1")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise InvalidArgument(f"batch_sizes={self.batch_sizes}: give one or more sizes of at least 1")
        if self.temperature < 0:
            raise InvalidArgument(f"temperature={self.temperature}: must be >= 0; 0 is greedy")
        parse(self.rule)


class Listener(Protocol):
    """Who shows the progress."""

    def planned(self, plan: Plan) -> None: ...

    def starting(self, what: str) -> None: ...

    def finished(self, expected_seconds: float) -> None:
        """A call is over that was expected to take that long; 0 for a warm-up."""
        ...


def run(
    settings: Settings,
    bench: Bench,
    questions: Questions,
    listener: Listener,
    save: Callable[[Record], None],
    command: Sequence[str],
    contenders: Sequence[Contender] | None = None,
) -> Record:
    """Measure, and `save` what was measured, however it ends. After Ctrl-C the record says that it is incomplete."""
    origin = provenance(bench.target.device, command)
    with same_law(bench.target, bench.draft):
        contenders = contenders or [CONTENDERS[name](bench) for name in settings.methods]
        try:
            chosen = prepare(settings, bench, questions, contenders, listener)
        except KeyboardInterrupt:
            return _record(settings, origin, questions, contenders, None, [], complete=False)
        return _measure(settings, bench, questions, contenders, chosen, listener, save, origin)


def prepare(
    settings: Settings, bench: Bench, questions: Questions, contenders: Sequence[Contender], listener: Listener
) -> Plan:
    """Warm up every contender at every batch size, and size the plan by how fast the baseline turned out to be."""
    speeds = warm_up(settings, bench, contenders, listener)
    prompts = pools(questions, settings.categories or questions.categories, bench.tokenizer, _room(settings, bench))
    chosen = plan(
        prompts,
        settings.batch_sizes,
        settings.prompts_per_category,
        cost=lambda group: speeds[group.batch].call(group, settings.max_new_tokens),
        turns=lambda group: settings.repeats * sum(c.refusal(group.batch) is None for c in contenders),
        budget=60 * settings.minutes,
    )
    if not chosen.groups:
        raise InvalidArgument("no prompts are left to measure: " + "; ".join(chosen.notes))
    listener.planned(chosen)
    return chosen


def warm_up(settings: Settings, bench: Bench, contenders: Sequence[Contender], listener: Listener) -> dict[int, Speed]:
    """The first call of a shape pays for allocations and thread pools. The baseline's also show its speed."""
    texts = [text for row in zip(*BUILT_IN.values(), strict=True) for text in row]
    speeds = {}
    for batch in settings.batch_sizes:
        asked = [Question("warm-up", f"{texts[i % len(texts)]} ({i})") for i in range(batch)]
        prompts = encode(bench.tokenizer, asked)
        group = Group("warm-up", 0, tuple(prompt[: _room(settings, bench)] for prompt in prompts))
        for place, contender in enumerate(contenders):
            if contender.refusal(batch) is None:
                listener.starting(f"warming up: batch {batch}, {contender.title}")
                contender.run(group.prompts, WARM_UP_TOKENS)
                if place == 0:
                    speeds[batch] = _speed(contender, group)
                listener.finished(0.0)
    return speeds


def compare(
    chosen: Plan,
    contenders: Sequence[Contender],
    settings: Settings,
    listener: Listener,
    keep: Callable[[Measurement], None],
    judge: Judge,
) -> None:
    """A B C on the first group, A B C on the second ...; each measurement is kept as soon as it is there."""
    for repeat in range(settings.repeats):
        for place, group in enumerate(chosen.groups):
            baseline: Run | None = None
            for contender in contenders:
                if contender.refusal(group.batch) is not None:
                    continue
                listener.starting(f"batch {group.batch}, {group.category}, {contender.title}")
                done = contender.run(group.prompts, settings.max_new_tokens)
                agreement = None if baseline is None else judge(group, baseline, done)
                keep(_measurement(contender, group, repeat, done, agreement))
                baseline = baseline or done
                listener.finished(chosen.seconds[place])


def _measure(
    settings: Settings,
    bench: Bench,
    questions: Questions,
    contenders: Sequence[Contender],
    chosen: Plan,
    listener: Listener,
    save: Callable[[Record], None],
    origin: Provenance,
) -> Record:
    measured: list[Measurement] = []
    complete = False

    def judge(group: Group, baseline: Run, done: Run) -> Agreement | None:
        """Sampled texts differ by chance, so only greedy ones are compared."""
        if settings.temperature > 0:
            return None
        return compare_outputs(bench.target, group.prompts, baseline.tokens, done.tokens)

    try:
        compare(chosen, contenders, settings, listener, measured.append, judge)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        record = _record(settings, origin, questions, contenders, chosen, measured, complete=complete)
        if measured:
            save(record)
    return record


def _record(
    settings: Settings,
    origin: Provenance,
    questions: Questions,
    contenders: Sequence[Contender],
    chosen: Plan | None,
    measured: Sequence[Measurement],
    *,
    complete: bool,
) -> Record:
    found = asdict(settings) | {"prompts": questions.source, "end_token": "ignored"}
    if chosen is not None:
        found["prompts_per_category"] = chosen.prompts_per_category
        found["categories"] = list(dict.fromkeys(group.category for group in chosen.groups))
        found["expected_seconds"] = round(chosen.total_seconds, 1)
    refusals = [
        Refusal(contender.name, batch, reason)
        for batch in settings.batch_sizes
        for contender in contenders
        if (reason := contender.refusal(batch)) is not None
    ]
    return Record(
        provenance=origin,
        settings={name: list(value) if isinstance(value, tuple) else value for name, value in found.items()},
        titles={contender.name: contender.title for contender in contenders},
        complete=complete,
        measurements=tuple(measured),
        refusals=tuple(refusals),
        notes=chosen.notes if chosen else (),
    )


def _measurement(
    contender: Contender, group: Group, repeat: int, done: Run, agreement: Agreement | None
) -> Measurement:
    return Measurement(
        method=contender.name,
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


def _speed(contender: Contender, group: Group) -> Speed:
    first = contender.run(group.prompts, 1).seconds
    more = contender.run(group.prompts, 1 + WARM_UP_TOKENS // 2).seconds
    return Speed(first / group.padded_tokens, max(more - first, 0.0) / (WARM_UP_TOKENS // 2))


def _room(settings: Settings, bench: Bench) -> int | None:
    """Tokens a prompt may have, so that the output still fits the context."""
    context: Any = getattr(bench.target.config, "max_position_embeddings", None)
    return None if context is None else context - settings.max_new_tokens
