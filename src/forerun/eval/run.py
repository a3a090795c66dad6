"""Answer every task both ways, in turns, and score what was said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from forerun.eval.journal import Answer, Answered, Entry, Journal
from forerun.eval.prepare import Prepared
from forerun.eval.settings import Settings
from forerun.eval.tasks import Example, Made
from forerun.eval.ways import Asked, Call, Way, Written

WARM_UP = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
# (prompt, plain tokens, speculative tokens) -> identical, ties or different
Judge = Callable[[Sequence[int], Sequence[int], Sequence[int]], str]
# (number of the window, way) -> minus its log-probability, seconds
Reader = Callable[[Any, str], tuple[float, float]]


class Listener(Protocol):
    """Whoever shows how far it is."""

    def planned(self, steps: int, done: int) -> None: ...

    def doing(self, what: str) -> None: ...

    def done(self) -> None: ...


class Silent:
    """Nobody watches."""

    def planned(self, steps: int, done: int) -> None:
        """Not shown."""

    def doing(self, what: str) -> None:
        """Not shown."""

    def done(self) -> None:
        """Not shown."""


def answer_all(
    tasks: Sequence[Prepared],
    ways: Sequence[Way],
    settings: Settings,
    decode: Callable[[Sequence[int]], str],
    journal: Journal,
    *,
    judge: Judge | None = None,
    reader: Reader | None = None,
    listener: Listener | None = None,
) -> None:
    """Every call of every task by every way, unless the journal has it already."""
    listener = listener or Silent()
    for prepared in tasks:
        journal.begin(prepared.task.name, prepared.source)
    steps = [step for prepared in tasks for step in _steps(prepared, ways, settings)]
    open_steps = [step for step in steps if step[2:] not in _keys(journal, step[0])]
    listener.planned(len(steps), len(steps) - len(open_steps))
    if any(prepared.asked for prepared, *_ in open_steps):
        _warm_up(tasks, ways, listener)
    for prepared, part, call, name in open_steps:
        listener.doing(f"{prepared.task.title}, {name}")
        if prepared.windows:
            assert reader is not None
            nll, seconds = reader(prepared.windows[part.start], name)
            scored = prepared.windows[part.start].num_scored
            entry = Entry(prepared.task.name, call, name, seconds, nll=nll, tokens=scored)
        else:
            way = next(way for way in ways if way.name == name)
            made = way.answer(prepared.asked[part], prepared.keywords)
            entry = _scored(prepared, part, call, name, made, decode, settings)
            entry = _judged(entry, prepared.asked[part], ways, journal, judge)
        journal.write(entry)
        listener.done()


Step = tuple[Prepared, slice, int, str]


def _steps(prepared: Prepared, ways: Sequence[Way], settings: Settings) -> Iterator[Step]:
    """Ways take turns at going first, so that a machine that slows down is nobody's loss."""
    size = 1 if prepared.windows else settings.prompts_per_call
    names = [way.name for way in ways]
    for call, start in enumerate(range(0, prepared.size, size)):
        for name in names if call % 2 == 0 else reversed(names):
            yield prepared, slice(start, start + size), call, name


def _keys(journal: Journal, prepared: Prepared) -> set[tuple[int, str]]:
    return {(call, way) for task, call, way in journal.entries if task == prepared.task.name}


def _warm_up(tasks: Sequence[Prepared], ways: Sequence[Way], listener: Listener) -> None:
    """One short call that is not counted: compilers and measured costs."""
    listener.doing("warming up")
    shortest = min((asked for prepared in tasks for asked in prepared.asked), key=lambda asked: len(asked.tokens))
    for way in ways:
        way.answer([shortest], dict(WARM_UP))


def _scored(
    prepared: Prepared,
    part: slice,
    call: int,
    way: str,
    made: Call,
    decode: Callable[[Sequence[int]], str],
    settings: Settings,
) -> Entry:
    """Programs are run side by side: most of their time is spent waiting for a process to start."""
    examples, asked = prepared.examples[part], prepared.asked[part]

    def score(pair: tuple[Example, Written]) -> Answer:
        example, written = pair
        text = decode(written.tokens)
        found = prepared.task.score(example, Made(text, written.tokens), settings.code_limits)
        return Answer(
            text=text,
            tokens=written.tokens,
            finish=written.finish,
            seconds=written.seconds,
            mean_logprob=written.mean_logprob,
            rounds=written.rounds,
            drafted=written.drafted,
            accepted=written.accepted,
            scores=found.values,
            note=found.note,
        )

    pairs = [(example, one) for example, copies in zip(examples, made.prompts, strict=True) for one in copies]
    if prepared.task.runs_code:
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            answers = list(pool.map(score, pairs))
    else:
        answers = [score(pair) for pair in pairs]
    copies = len(made.prompts[0])
    rows = tuple(
        Answered(one.index, example.id, example.category, tuple(answers[place * copies : (place + 1) * copies]))
        for place, (one, example) in enumerate(zip(asked, examples, strict=True))
    )
    return Entry(prepared.task.name, call, way, made.seconds, rows)


def _judged(entry: Entry, asked: Sequence[Asked], ways: Sequence[Way], journal: Journal, judge: Judge | None) -> Entry:
    """Compare texts once both ways have answered."""
    other = next((way.name for way in ways if way.name != entry.way), None)
    partner = journal.entries.get((entry.task, entry.call, other or ""))
    if judge is None or partner is None:
        return entry
    plain, drafted = (entry, partner) if entry.way == ways[0].name else (partner, entry)
    verdicts = [
        judge(one.tokens, a.answers[0].tokens, b.answers[0].tokens)
        for one, a, b in zip(asked, plain.examples, drafted.examples, strict=True)
    ]
    rows = (replace(row, agreement=said) for row, said in zip(entry.examples, verdicts, strict=True))
    return replace(entry, examples=tuple(rows))
