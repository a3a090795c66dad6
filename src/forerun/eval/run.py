"""Answer every task both ways, in turns, and score what was said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from forerun.eval.journal import Answer, Answered, Entry, Journal
from forerun.eval.methods import Call, DecodedSequence, Method
from forerun.eval.prepare import Prepared
from forerun.eval.settings import EvalSettings
from forerun.eval.tasks import Example, Made, Score
from forerun.eval.windows import Window
from forerun.measure.progress import Reporter, Silent

WARM_UP = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
# (prompt, plain tokens, speculative tokens) -> identical, ties or different
Judge = Callable[[Sequence[int], Sequence[int], Sequence[int]], str]
# (window, way) -> minus its log-probability, seconds
Reader = Callable[[Window, str], tuple[float, float]]
Decode = Callable[[Sequence[int]], str]


def answer_all(
    tasks: Sequence[Prepared],
    ways: Sequence[Method],
    settings: EvalSettings,
    decode: Decode,
    journal: Journal,
    *,
    judge: Judge | None = None,
    reader: Reader | None = None,
    reporter: Reporter | None = None,
) -> None:
    """Every call of every task by every way, unless the journal has it already."""
    reporter = reporter or Silent()
    for prepared in tasks:
        journal.begin(prepared.task.name, prepared.source)
    steps = [step for prepared in tasks for step in _steps(prepared, ways, settings)]
    open_steps = [step for step in steps if step.key not in journal.entries]
    reporter.start("starting", total=len(steps))
    reporter.advance(len(steps) - len(open_steps))
    if any(step.prepared.asked for step in open_steps):
        _warm_up(tasks, ways, reporter)
    for step in open_steps:
        reporter.start(f"{step.prepared.task.title}, {step.way}")
        if step.prepared.windows:
            assert reader is not None
            entry = _read(step, reader)
        else:
            way = next(way for way in ways if way.name == step.way)
            made = way.answer(step.prepared.asked[step.part], step.prepared.keywords)
            entry = _judged(_scored(step, made, decode, settings), step, ways, journal, judge)
        journal.write(entry)
        reporter.advance()


@dataclass(frozen=True, slots=True)
class Step:
    """One call to make: a part of a task's examples or windows, by one way."""

    prepared: Prepared
    part: slice
    call: int
    way: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.prepared.task.name, self.call, self.way


def _steps(prepared: Prepared, ways: Sequence[Method], settings: EvalSettings) -> Iterator[Step]:
    """Ways take turns at going first, so that a machine that slows down is nobody's loss."""
    size = 1 if prepared.windows else settings.prompts_per_call
    names = [way.name for way in ways]
    for call, start in enumerate(range(0, prepared.size, size)):
        for name in names if call % 2 == 0 else reversed(names):
            yield Step(prepared, slice(start, start + size), call, name)


def _warm_up(tasks: Sequence[Prepared], ways: Sequence[Method], reporter: Reporter) -> None:
    """One short call that is not counted: compilers and measured costs."""
    reporter.start("warming up")
    shortest = min((asked for prepared in tasks for asked in prepared.asked), key=lambda asked: len(asked.tokens))
    for way in ways:
        way.answer([shortest], dict(WARM_UP))


def _read(step: Step, reader: Reader) -> Entry:
    window = step.prepared.windows[step.part.start]
    nll, seconds = reader(window, step.way)
    return Entry(*step.key, seconds, nll=nll, tokens=window.num_scored)


def _scored(step: Step, made: Call, decode: Decode, settings: EvalSettings) -> Entry:
    """Programs are run side by side: most of their time is spent waiting for a process to start."""
    examples, asked = step.prepared.examples[step.part], step.prepared.asked[step.part]

    def score(pair: tuple[Example, DecodedSequence]) -> Answer:
        example, written = pair
        said = Made(decode(written.tokens), written.tokens)
        return _answer(said, written, step.prepared.task.score(example, said, settings.code_limits))

    pairs = [(example, one) for example, copies in zip(examples, made.prompts, strict=True) for one in copies]
    if step.prepared.task.runs_code:
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            answers = list(pool.map(score, pairs))
    else:
        answers = [score(pair) for pair in pairs]
    copies = len(made.prompts[0])
    rows = tuple(
        Answered(one.index, example.id, example.category, tuple(answers[place * copies : (place + 1) * copies]))
        for place, (one, example) in enumerate(zip(asked, examples, strict=True))
    )
    return Entry(*step.key, made.seconds, rows)


def _answer(said: Made, written: DecodedSequence, score: Score) -> Answer:
    return Answer(
        text=said.text,
        tokens=written.tokens,
        finish=written.finish,
        seconds=written.seconds,
        mean_logprob=written.mean_logprob,
        rounds=written.rounds,
        drafted=written.drafted,
        accepted=written.accepted,
        scores=score.values,
        note=score.note,
    )


def _judged(entry: Entry, step: Step, ways: Sequence[Method], journal: Journal, judge: Judge | None) -> Entry:
    """Compare texts once both ways have answered."""
    other = next((way.name for way in ways if way.name != entry.way), "")
    partner = journal.entries.get((entry.task, entry.call, other))
    if judge is None or partner is None:
        return entry
    asked = step.prepared.asked[step.part]
    plain, drafted = (entry, partner) if entry.way == ways[0].name else (partner, entry)
    verdicts = [
        judge(one.tokens, a.answers[0].tokens, b.answers[0].tokens)
        for one, a, b in zip(asked, plain.examples, drafted.examples, strict=True)
    ]
    rows = (replace(row, agreement=said) for row, said in zip(entry.examples, verdicts, strict=True))
    return replace(entry, examples=tuple(rows))
