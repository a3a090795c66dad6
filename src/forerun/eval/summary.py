"""What the answers of a task say: scores with their intervals, whether the two ways differ, and what drafts gained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from forerun.engine import FinishReason
from forerun.eval.estimate import Estimate, compare
from forerun.eval.journal import Answered, Entry, Journal
from forerun.eval.methods import METHODS, PLAIN, UNFINISHED
from forerun.eval.passes import Candidate, PassSummary, pass_at_k, service
from forerun.eval.prepare import Prepared
from forerun.eval.settings import EvalSettings
from forerun.eval.tasks import Answer, Metric, Task
from forerun.measure.reference import Agreement
from forerun.measure.repetition import repeated_share

SAME, AGREE, DIFFER, TOO_FEW = "same text", "agree", "DIFFER", "too few"
SILENT_ENDINGS = ("passed", "failed")


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric, both ways."""

    metric: str
    title: str
    is_share: bool
    plain: Estimate
    speculative: Estimate
    difference: Estimate  # speculative less plain, example by example
    p_value: float | None
    tolerance: float = 0.0  # a difference that rounding alone explains
    level: float | None = None  # the p-value has to be below it for decoders to differ; None where nothing is drawn

    @property
    def verdict(self) -> str:
        """Decoders differ where the exact test says so, too: the interval knows too little of a handful of texts."""
        reaches = self.difference.holds(0.0, self.tolerance)
        if reaches:
            return AGREE
        unsure = self.level is not None and (self.p_value is None or self.p_value >= self.level)
        return TOO_FEW if reaches is None or unsure else DIFFER


@dataclass(frozen=True, slots=True)
class Speed:
    """All calls of one way together, reading prompts included."""

    seconds: float
    tokens: int
    rounds: int  # target forwards times the rows they served
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class CategoryResult:
    """One category of a task."""

    category: str
    examples: int
    tokens_per_round: Mapping[str, float]  # by way
    repeated: Mapping[str, float]
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What is known of one task."""

    task: str
    title: str
    source: str
    total: int  # examples there are
    examples: int  # of them answered both ways
    confidence: float  # of each score's interval
    difference_confidence: float  # of each difference: the first differences of all tasks hold together as often
    comparisons: tuple[MetricComparison, ...]  # the first decides the verdict
    speeds: Mapping[str, Speed]
    agreement: Agreement | None  # of greedy texts
    parts: tuple[CategoryResult, ...] = ()
    services: Mapping[str, PassSummary] | None = None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether the two ways differ beyond noise."""
        whole = self.agreement is not None and self.agreement.identical == self.examples
        return SAME if whole else self.comparisons[0].verdict

    @property
    def times_as_fast(self) -> float | None:
        """Tokens per second with drafts over those of plain decoding."""
        plain, drafted = (self.speeds[method].tokens_per_second for method in METHODS)
        return drafted / plain if plain else None


def summarise(
    prepared: Prepared,
    journal: Journal,
    settings: EvalSettings,
    tasks: int,
    tolerance: Callable[[float], float] = lambda perplexity: 0.0,
) -> TaskResult | None:
    """Of the calls that both ways have made; None where there are none. `tasks` are compared in the same run."""
    entries = _paired(journal, prepared.task.name)
    if not entries[PLAIN]:
        return None
    wider = 1 - (1 - settings.confidence) / tasks
    rows = {way: [row for entry in entries[way] for row in entry.examples] for way in METHODS}
    if prepared.windows:
        comparisons = [_perplexity(prepared.task.primary, entries, settings, wider, tolerance)]
    else:
        comparisons = _comparisons(prepared.task, rows, settings, wider)
    is_service = not prepared.windows and (settings.num_sequences > 1 or settings.max_time is not None)
    return TaskResult(
        task=prepared.task.name,
        title=prepared.task.title,
        source=prepared.source,
        total=prepared.total,
        examples=len(entries[PLAIN]) if prepared.windows else len(rows[PLAIN]),
        confidence=settings.confidence,
        difference_confidence=wider,
        comparisons=tuple(comparisons),
        speeds={way: _speed(entries[way]) for way in METHODS},
        agreement=_agreement([row for way in METHODS for row in rows[way]]),
        parts=_parts(rows),
        services={way: _service(prepared.task, rows[way]) for way in METHODS} if is_service else None,
        notes=(*prepared.notes, *(note for way in METHODS for note in _endings(prepared.task, way, rows[way]))),
    )


def _paired(journal: Journal, task: str) -> dict[str, list[Entry]]:
    calls = [{entry.call for entry in journal.of(task, way)} for way in METHODS]
    common = calls[0] & calls[1]
    return {way: [entry for entry in journal.of(task, way) if entry.call in common] for way in METHODS}


def _comparisons(
    task: Task, rows: Mapping[str, Sequence[Answered]], settings: EvalSettings, wider: float
) -> list[MetricComparison]:
    metrics = task.metrics
    if task.is_pass and settings.num_sequences > 1:
        metrics = tuple(Metric(f"pass@{k}", f"pass@{k}") for k in settings.ks)
    return [
        _comparison(metric, [[_value(task, metric, row) for row in rows[way]] for way in METHODS], settings, wider)
        for metric in metrics
    ]


def _comparison(
    metric: Metric, values: Sequence[Sequence[float]], settings: EvalSettings, wider: float, **shape: Any
) -> MetricComparison:
    """`values` of plain and of speculative decoding, example by example."""
    paired = compare(*values, confidence=settings.confidence, difference_confidence=wider, **shape)
    figures = (paired.plain, paired.speculative, paired.difference, paired.p_value)
    return MetricComparison(metric.name, metric.title, metric.is_share, *figures, level=1 - wider)


def _value(task: Task, metric: Metric, row: Answered) -> float:
    """pass@k of the row's answers, or their mean."""
    if metric.name.startswith("pass@"):
        correct = sum(_passed(task, answer) for answer in row.answers)
        return pass_at_k(len(row.answers), correct, int(metric.name.removeprefix("pass@")))
    return fmean(answer.scores[metric.name] for answer in row.answers)


def _passed(task: Task, answer: Answer) -> bool:
    return task.is_pass and answer.scores[task.primary.name] == 1


def _perplexity(
    metric: Metric,
    entries: Mapping[str, Sequence[Entry]],
    settings: EvalSettings,
    wider: float,
    tolerance: Callable[[float], float],
) -> MetricComparison:
    values = [[entry.nll / entry.tokens for entry in entries[way]] for way in METHODS]
    weights = [float(entry.tokens) for entry in entries[PLAIN]]
    comparison = _comparison(metric, values, settings, wider, weights=weights, exponential=True)
    return replace(comparison, tolerance=tolerance(comparison.plain.value), level=None)


def _speed(entries: Sequence[Entry]) -> Speed:
    answers = [answer for entry in entries for row in entry.examples for answer in row.answers]
    return Speed(
        seconds=sum(entry.seconds for entry in entries),
        tokens=sum(len(answer.tokens) for answer in answers) + sum(entry.tokens for entry in entries),
        rounds=sum(answer.rounds for answer in answers),
        drafted=sum(answer.drafted for answer in answers),
        accepted=sum(answer.accepted for answer in answers),
    )


def _agreement(rows: Sequence[Answered]) -> Agreement | None:
    counts = Counter(row.agreement for row in rows if row.agreement is not None)
    return Agreement(counts["identical"], counts["ties"], counts["different"]) if counts else None


def _parts(rows: Mapping[str, Sequence[Answered]]) -> tuple[CategoryResult, ...]:
    names = list(dict.fromkeys(row.category for row in rows[PLAIN] if row.category))
    return tuple(
        _part(name, {way: [row for row in rows[way] if row.category == name] for way in METHODS}) for name in names
    )


def _part(name: str, rows: Mapping[str, Sequence[Answered]]) -> CategoryResult:
    answers = {way: [answer for row in rows[way] for answer in row.answers] for way in METHODS}
    return CategoryResult(
        category=name,
        examples=len(rows[PLAIN]),
        tokens_per_round={
            way: sum(len(a.tokens) for a in answers[way]) / max(sum(a.rounds for a in answers[way]), 1)
            for way in METHODS
        },
        repeated={way: repeated_share([answer.tokens for answer in answers[way]]) for way in METHODS},
        agreement=_agreement([row for way in METHODS for row in rows[way]]),
    )


def _service(task: Task, rows: Sequence[Answered]) -> PassSummary:
    return service(
        [
            [
                Candidate(_passed(task, a), a.finish not in UNFINISHED, a.mean_logprob, a.seconds, len(a.tokens))
                for a in row.answers
            ]
            for row in rows
        ]
    )


def _endings(task: Task, way: str, rows: Sequence[Answered]) -> list[str]:
    """Answers that broke off, and programs that had to be stopped."""
    answers = [answer for row in rows for answer in row.answers]
    broken = sum(answer.finish == FinishReason.ERROR for answer in answers)
    notes = [f"{task.title}, {way}: {broken} answers broke off, because logits were not finite"] if broken else []
    endings = Counter(answer.note.partition(":")[0] for answer in answers) if task.runs_code else {}
    stopped = [f"{count} {ending}" for ending, count in endings.items() if ending not in SILENT_ENDINGS]
    return [
        *notes,
        *([f"{task.title}, {way}: programs stopped by the sandbox: {', '.join(stopped)}"] if stopped else []),
    ]
