"""`forerun bench`: every method decodes a group of prompts before the next group begins: drift hits all alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from forerun.arguments import refuse
from forerun.bench.builtin import BUILT_IN
from forerun.bench.costs import memory_turns, prompt_turns
from forerun.bench.llamacpp.peer import MISSING, PEER, Peer, PeerSettings, find
from forerun.bench.methods import (
    METHODS,
    Bench,
    Method,
    Run,
    check_methods,
    default_methods,
    rounded_methods,
    same_law,
)
from forerun.bench.prompts import Question, Questions, encode, find_questions, pools
from forerun.bench.report import make_record
from forerun.bench.results import Measurement, Refusal, Results
from forerun.bench.schedule import BaselineSpeed, Group, Schedule, make_schedule
from forerun.bench.settings import CompareSettings
from forerun.config import num_ranks
from forerun.drafters.named import AUTO, OFF, draft_models, is_draft_model, named_drafter, refuse_misspelt
from forerun.errors import InvalidArgument
from forerun.loading.load import STORED, load_tokenizer
from forerun.loading.source import resolve
from forerun.measure.progress import Reporter
from forerun.measure.provenance import busy_note, provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.reference import Agreement, compare_texts
from forerun.measure.repetition import repeated_share
from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from forerun.models.families import context_length
from forerun.parallel import load_draft
from forerun.parallel.draft import check_draft_split, placement
from forerun.parallel.start import sharded_target

WARM_UP_TOKENS = 16
PEER_PROMPTS = (128, 512)
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
    draft: str | None  # a model's name ...
    drafter: str | None  # ... or that of another drafter
    peer: Peer | None = None
    note: str | None = None  # why a peer that was asked for is left out


def check(
    *,
    model: str,
    draft: str | None = None,
    data: Path | None = None,
    methods: Sequence[str] | None = None,
    quick: bool = False,
    peer: Literal["llama.cpp"] | None = None,
    llama_server: str | None = None,
    **chosen: Any,
) -> Comparison:
    """Refuse whatever can be refused now. `chosen` are fields of `CompareSettings`; None stands for the default."""
    chosen = {name: value for name, value in chosen.items() if value is not None}
    chosen["tensor_parallel"] = num_ranks(chosen.get("tensor_parallel", 1))
    name = None if draft is None or draft.strip() in OFF else draft.strip()
    draft = name if name is not None and is_draft_model(name) else None
    if draft is not None:
        refuse_misspelt(draft, "--draft")
    other = _find_peer(peer, llama_server, model)
    theirs = other.names(draft is not None and _gguf_file(draft) is not None) if other else ()
    names = check_methods(methods, name, theirs) if methods else default_methods(name, theirs)
    settings = CompareSettings(
        model=without_folders(model), draft=without_folders(name) if name else None, methods=names, peer=peer,
        llama_server=without_folders(llama_server) if llama_server else None,
        **({"prompt_lengths": PEER_PROMPTS} if other else {}) | (QUICK if quick else {}) | chosen,
    )  # fmt: skip
    check_draft_split(settings.draft_split, draft_models(name or "none"), settings.tensor_parallel)
    questions = find_questions(data)
    for category in settings.categories:
        questions.of(category)
    drafter = None if draft is not None else name
    return Comparison(settings, questions, model, draft, drafter, other, MISSING if peer and other is None else None)


def _find_peer(peer: str | None, llama_server: str | None, model: str) -> Peer | None:
    if peer is None:
        return None
    if peer != PEER:
        refuse("peer", peer, f"there is {PEER!r}")
    if _gguf_file(model) is None:
        refuse("model", model, f"{PEER} reads GGUF files; give one, or 'embedded'")
    return find(llama_server)


def _gguf_file(model: str) -> Path | None:
    return resolve(model).blocks


def load_and_run(asked: Comparison, output: Path, reporter: Reporter, **where: Any) -> Record:
    """Load, measure, store. `where` goes to `load_model`: device, dtype."""
    from forerun.loading import load_model

    settings, peer = asked.settings, asked.peer
    for note in filter(None, (asked.note, asked.questions.note)):
        reporter.say(note)
    reporter.start(f"loading {settings.model}")
    if peer is not None and where.get("dtype") is None:
        where = where | {"dtype": STORED}  # the file's own blocks, as the peer reads them
    drafter, load = None, load_model
    if asked.drafter is not None and asked.drafter != AUTO and settings.tensor_parallel == 1:
        drafter = named_drafter(asked.drafter, option="--draft", **where)  # what is wrong with a name is seen at once
    if settings.tensor_parallel > 1:  # first, because other ranks go no further than this
        target: Any = sharded_target(asked.model, settings.tensor_parallel, where)
        tokenizer = load_tokenizer(asked.model, offline=where["offline"])
        load = partial(load_draft, split=settings.draft_split, use=settings.kernels)
    else:
        target, tokenizer = load_model(asked.model, **where)
    if asked.drafter is not None and drafter is None:  # which one depends on the target
        drafter = named_drafter(asked.drafter, target, option="--draft", load_model=load, **where)
    draft, draft_tokenizer = load(asked.draft, **where) if asked.draft else (None, None)
    if (told := placement()) is not None:
        reporter.say(f"draft model: {told}")
    bench = Bench(
        target, tokenizer, settings.temperature, settings.seed, draft, draft_tokenizer,
        kernels=settings.kernels, rule=settings.rule, loading={"name_or_path": asked.model, **where},
        drafter=drafter, drafter_name=settings.draft,
    )  # fmt: skip
    with ExitStack() as stack:
        methods: list[Method] = []
        if peer is not None:
            reporter.start(f"starting {peer.source}")
            methods += stack.enter_context(_peer_methods(asked, peer, bench))
        stack.enter_context(same_law(target, draft))
        methods += [METHODS[name](bench) for name in settings.methods if name in METHODS]
        for scheme in settings.quantize:
            reporter.start(f"loading {settings.model} as {scheme}")
            loading = {"name_or_path": asked.model, **where, "dtype": None, "quantize": scheme}
            if target.device.type == "cpu":
                loading["dtype"] = "float32"  # of a file with blocks of its own
            rounded = replace(bench, target=load_model(**loading)[0], loading=loading)
            methods += rounded_methods(rounded, scheme)
        return run(settings, bench, asked.questions, output, reporter, methods)


def _peer_methods(asked: Comparison, peer: Peer, bench: Bench) -> AbstractContextManager[list[Method]]:
    """With as much room as the longest prompt takes: more would count against its memory."""
    settings, room = asked.settings, _room(asked.settings, bench)
    prompts = pools(asked.questions, settings.categories or asked.questions.categories, bench.tokenizer, room)
    longest = max((len(prompt) for each in prompts.values() for prompt in each), default=0)
    model = _gguf_file(asked.model)
    assert model is not None
    peer_settings = PeerSettings(
        model, _gguf_file(asked.draft) if asked.draft else None, max(settings.batch_sizes),
        max(longest, *settings.prompt_lengths, 0) + settings.max_new_tokens, threads=torch.get_num_threads(),
        on_gpu=bench.target.device.type == "cuda", temperature=settings.temperature, seed=settings.seed,
    )  # fmt: skip
    return peer.methods(peer_settings, [name for name in settings.methods if name not in METHODS])


def run(
    settings: CompareSettings,
    bench: Bench,
    questions: Questions,
    output: Path,
    reporter: Reporter,
    methods: Sequence[Method] | None = None,
) -> Record:
    """Measure, and store after every call. After Ctrl-C the record says that it is incomplete."""
    with same_law(bench.target, bench.draft):
        methods = methods or [METHODS[name](bench) for name in settings.methods]
        results = Results(
            provenance(bench.target.device),
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
        busy = busy_note("began")  # the methods themselves wait for each other: who is at work is somebody else
        results.notes = schedule.notes + ((busy,) if busy else ())
        results.settings["prompts_per_category"] = schedule.prompts_per_category
        results.settings["categories"] = list(dict.fromkeys(group.category for group in schedule.groups))
        results.settings["expected_seconds"] = round(schedule.total_seconds, 1)

        def save(outcome: TurnsOutcome) -> Record:
            return make_record(results, outcome.complete).kept(output)

        turns = _turns(schedule, methods, settings, results.measurements)
        if settings.prompt_lengths:
            turns += prompt_turns(schedule.pools, settings.prompt_lengths, methods, results)
        if settings.peer is not None:
            turns += memory_turns(methods, results)
        return take_turns(turns, reporter, save)


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
        f"{schedule.total_seconds / 60:.1f} minutes (if every method were as fast as {methods[0].title})"
    )
    return schedule


def warm_up(
    settings: CompareSettings, bench: Bench, methods: Sequence[Method], reporter: Reporter
) -> dict[int, BaselineSpeed]:
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
    schedule: Schedule, methods: Sequence[Method], settings: CompareSettings, measured: list[Measurement]
) -> list[Turn]:
    """A B C on the first group, A B C on the second ...; of every second repetition C B A.

    What a machine does to whoever comes last, it then does to each as often. The text of the first method of a target
    is what that of its others is held to.
    """
    expected: dict[tuple[int, int], Run] = {}

    def one(method: Method, place: int, repeat: int) -> None:
        group = schedule.groups[place]
        done = method.run(group.prompts, settings.max_new_tokens)
        leader = next(m for m in methods if m.target is method.target and m.refusal(group.batch) is None)
        key = place, id(method.target)
        agreement: Agreement | None = None
        if method is leader:
            expected[key] = done
        elif method.target is not None and settings.temperature == 0:  # samples differ by chance
            agreement = compare_texts(method.target, group.prompts, expected[key].tokens, done.tokens)
        measured.append(_measurement(method, group, repeat, done, agreement))

    return [
        Turn(
            f"batch {group.batch}, {group.category}, {method.title}",
            partial(one, method, place, repeat),
            schedule.seconds[place],
        )
        for repeat in range(settings.repeats)
        for place, group in enumerate(schedule.groups)
        for method in methods[:: -1 if repeat % 2 else 1]
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


def _speed(method: Method, group: Group) -> BaselineSpeed:
    first = method.run(group.prompts, 1).seconds
    more = method.run(group.prompts, 1 + WARM_UP_TOKENS // 2).seconds
    return BaselineSpeed(first / group.padded_tokens, max(more - first, 0.0) / (WARM_UP_TOKENS // 2))


def _room(settings: CompareSettings, bench: Bench) -> int | None:
    """Tokens a prompt may have, so that the output still fits the context."""
    context = context_length(bench.target.config.get_text_config(decoder=True))
    if context is not None and settings.max_new_tokens >= context:
        raise InvalidArgument(
            f"--max-new-tokens {settings.max_new_tokens}: the target's context ends at {context} tokens, prompt "
            "included; give fewer"
        )
    return None if context is None else context - settings.max_new_tokens
