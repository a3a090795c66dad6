"""Answer every task both ways, in turns, and score what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from forerun.eval.journal import Answered, Entry, Journal
from forerun.eval.methods import AnsweredCall, AnsweringMethod
from forerun.eval.prepare import Prepared
from forerun.eval.settings import EvalSettings
from forerun.eval.tasks import Answer, Example
from forerun.eval.windows import Window
from forerun.measure.progress import Reporter, Silent
from forerun.measure.turns import Turn, take_turns
from forerun.processes import usable_cores

WARM_UP = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
# (prompt, plain tokens, speculative tokens) -> identical, ties or different
CompareTexts = Callable[[Sequence[int], Sequence[int], Sequence[int]], str]
# (window, way) -> minus its log-probability, seconds
Reader = Callable[[Window, str], tuple[float, float]]


def answer_all(
    tasks: Sequence[Prepared],
    ways: Sequence[AnsweringMethod],
    settings: EvalSettings,
    journal: Journal,
    *,
    compare: CompareTexts | None = None,
    reader: Reader | None = None,
    reporter: Reporter | None = None,
) -> bool:
    """Every call of every task by every way, unless the journal has it already; False where Ctrl-C ended it."""
    for prepared in tasks:
        journal.begin(prepared.task.name, prepared.source)

    def answer(step: Step) -> None:
        if step.prepared.windows:
            assert reader is not None
            entry = _read(step, reader)
        else:
            way = next(way for way in ways if way.name == step.way)
            call = way.answer(step.prepared.asked[step.part], step.prepared.keywords)
            entry = _with_agreement(_scored(step, call, settings), step, ways, journal, compare)
        journal.write(entry)

    steps = [step for prepared in tasks for step in _steps(prepared, ways, settings)]
    open_steps = [step for step in steps if step.key not in journal.entries]
    turns = [Turn(f"{step.prepared.task.title}, {step.way}", partial(answer, step)) for step in open_steps]
    if any(step.prepared.asked for step in open_steps):
        turns.insert(0, Turn("warming up", partial(_warm_up, tasks, ways, settings.prompts_per_call)))
    return take_turns(turns, reporter or Silent(), lambda outcome: outcome.complete)


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


def _steps(prepared: Prepared, ways: Sequence[AnsweringMethod], settings: EvalSettings) -> Iterator[Step]:
    """Ways take turns at going first, so that a machine that slows down is nobody's loss."""
    size = 1 if prepared.windows else settings.prompts_per_call
    names = [way.name for way in ways]
    for call, start in enumerate(range(0, prepared.size, size)):
        for name in names if call % 2 == 0 else reversed(names):
            yield Step(prepared, slice(start, start + size), call, name)


def _warm_up(tasks: Sequence[Prepared], ways: Sequence[AnsweringMethod], rows: int) -> None:
    """One short call that is not counted, of as many rows as will be timed: what is compiled is for a batch size."""
    asked = sorted((asked for prepared in tasks for asked in prepared.asked), key=lambda asked: len(asked.tokens))
    several = [replace(prompt, index=place) for place, prompt in enumerate(asked[:rows])]  # of whichever tasks
    for way in ways:
        way.answer(several, dict(WARM_UP))


def _read(step: Step, reader: Reader) -> Entry:
    window = step.prepared.windows[step.part.start]
    nll, seconds = reader(window, step.way)
    return Entry(*step.key, seconds, nll=nll, tokens=window.num_scored)


def _scored(step: Step, call: AnsweredCall, settings: EvalSettings) -> Entry:
    """Programs are run side by side: most of their time is spent waiting for a process to start.

    As many as there are cores for them: their clocks run while they wait for one.
    """
    examples, asked = step.prepared.examples[step.part], step.prepared.asked[step.part]

    def score(pair: tuple[Example, Answer]) -> Answer:
        example, answer = pair
        scored = step.prepared.task.score(example, answer, settings.code_limits)
        return replace(answer, scores=scored.values, note=scored.note)

    pairs = [(example, answer) for example, copies in zip(examples, call.prompts, strict=True) for answer in copies]
    if step.prepared.task.runs_code:
        with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
            answers = list(pool.map(score, pairs))
    else:
        answers = [score(pair) for pair in pairs]
    copies = len(call.prompts[0])
    rows = tuple(
        Answered(one.index, example.id, example.category, tuple(answers[place * copies : (place + 1) * copies]))
        for place, (one, example) in enumerate(zip(asked, examples, strict=True))
    )
    return Entry(*step.key, call.seconds, rows)


def _with_agreement(
    entry: Entry, step: Step, ways: Sequence[AnsweringMethod], journal: Journal, compare: CompareTexts | None
) -> Entry:
    """Compare texts once both ways have answered."""
    other = next((way.name for way in ways if way.name != entry.way), "")
    partner = journal.entries.get((entry.task, entry.call, other))
    if compare is None or partner is None:
        return entry
    asked = step.prepared.asked[step.part]
    plain, drafted = (entry, partner) if entry.way == ways[0].name else (partner, entry)
    agreements = [
        compare(one.tokens, a.answers[0].tokens, b.answers[0].tokens)
        for one, a, b in zip(asked, plain.examples, drafted.examples, strict=True)
    ]
    rows = (replace(row, agreement=agreement) for row, agreement in zip(entry.examples, agreements, strict=True))
    return replace(entry, examples=tuple(rows))
