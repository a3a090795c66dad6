"""An evaluation as a record: what was found of each task, its tables and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forerun.eval.estimate import Estimate
from forerun.eval.methods import PLAIN, SPECULATIVE
from forerun.eval.prepare import MissingTask
from forerun.eval.summary import DIFFER, MetricComparison, TaskResult
from forerun.eval.tasks import TASKS
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

TEXT_NOTE = (
    "{title}: nothing is decoded, so this is the target itself, the same for plain and speculative decoding. 'plain' "
    "reads long passes, 'speculative' blocks of eight tokens over the cache, as drafts are verified: they part by "
    "rounding only"
)


def eval_record(
    provenance: Provenance,
    settings: Mapping[str, Any],
    results: Sequence[TaskResult],
    missing: Sequence[MissingTask] = (),
    notes: Sequence[str] = (),
    complete: bool = True,
) -> Record:
    return Record(
        kind="eval",
        provenance=provenance,
        settings=settings,
        rows=[_row(result) for result in results],
        details={"missing": tuple(missing), "notes": tuple(notes)},
        tables=tuple(_tables(results, settings)),
        remarks=tuple(_remarks(provenance, settings, results, missing, notes, complete)),
        headline=tuple(_headline(results)),
        complete=complete,
    )


def _row(result: TaskResult) -> dict[str, Any]:
    """The result with the figures that follow from it, for people who read the file."""
    speeds = result.speeds.items()
    return {
        **asdict(result),
        "verdict": result.verdict,
        "times_as_fast": result.times_as_fast,
        "tokens_per_second": {method: speed.tokens_per_second for method, speed in speeds},
        "tokens_per_round": {method: speed.tokens_per_round for method, speed in speeds},
    }


def _tables(results: Sequence[TaskResult], settings: Mapping[str, Any]) -> list[Table]:
    shown = [_scores(results), _speeds(results)] if results else []
    shown += [_parts(result) for result in results if result.parts]
    if any(result.services for result in results):
        shown.append(_services(results, settings))
    return shown


def _remarks(
    origin: Provenance,
    settings: Mapping[str, Any],
    results: Sequence[TaskResult],
    missing: Sequence[MissingTask],
    notes: Sequence[str],
    complete: bool,
) -> list[str]:
    """Where the figures come from, and what to know before quoting them."""
    sampling = (
        f"temperature {settings['temperature']:g}, seed {settings['seed']}" if settings["temperature"] else "greedy"
    )
    lines = [
        origin.sentence(),
        f"model {settings['model']}, drafts by {settings['draft']}, rule {settings['rule']}, {sampling}",
    ]
    lines += [f"Note: {note}." for result in results for note in result.notes]
    lines += [f"Note: {TEXT_NOTE.format(title=result.title)}." for result in results if TASKS[result.task].is_text]
    lines += [f"Note: {note}." for note in notes]
    lines += [f"Left out: {one.why}." for one in missing]
    if not complete:
        lines.append("Interrupted: these are the calls that both ways had made until then.")
    return lines


def _headline(results: Sequence[TaskResult]) -> list[str]:
    """The line to read if one reads nothing else."""
    if not results:
        return []
    names = ", ".join(result.title for result in results if result.verdict == DIFFER)
    if names:
        return [f"Plain and speculative decoding DIFFER beyond noise on: {names}."]
    chance = 1 - results[0].confidence
    return [
        f"No difference beyond noise on {len(results)} task{'s' * (len(results) > 1)} "
        f"(equal decoders would be told apart at most {chance:.0%} of the time, all tasks together)."
    ]


def _scores(results: Sequence[TaskResult]) -> Table:
    first = results[0]
    title = f"Scores with {first.confidence:.0%} confidence intervals"
    wider = f"{100 * first.difference_confidence:.4g} %"
    headings = ("task", "score", "examples", "plain", "speculative", f"difference ({wider})", "verdict")
    rows = [
        (result.title, *_score(result, comparison), result.verdict if place == 0 else "")
        for result in results
        for place, comparison in enumerate(result.comparisons)
    ]
    return Table(title, headings, tuple(rows))


def _score(result: TaskResult, comparison: MetricComparison) -> tuple[str, ...]:
    of = f"{result.examples} of {result.total}" if result.examples < result.total else str(result.examples)
    cells = (_interval(e, comparison.is_share) for e in (comparison.plain, comparison.speculative))
    return comparison.title, of, *cells, _interval(comparison.difference, comparison.is_share, sign="+")


def _interval(estimate: Estimate, is_share: bool, sign: str = "") -> str:
    scale, digits = (100, 1) if is_share else (1, 2)
    value = f"{estimate.value * scale:{sign}.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low * scale:{sign}.{digits}f}, {estimate.high * scale:{sign}.{digits}f}]"


def _speeds(results: Sequence[TaskResult]) -> Table:
    headings = (
        "task", "plain tokens/s", "speculative", "times as fast", "tokens a round", "accepted", "same text",
    )  # fmt: skip
    rows = []
    for result in results:
        plain, drafted = result.speeds[PLAIN], result.speeds[SPECULATIVE]
        decodes = bool(drafted.rounds)
        ratio = result.times_as_fast if decodes else None
        rate = drafted.acceptance_rate
        rows.append(
            (
                result.title,
                f"{plain.tokens_per_second:.1f}",
                f"{drafted.tokens_per_second:.1f}",
                NOTHING if ratio is None else f"{ratio:.2f}x",
                f"{drafted.tokens_per_round:.2f}" if decodes else NOTHING,
                NOTHING if rate is None else f"{rate:.0%}",
                NOTHING if result.agreement is None else str(result.agreement),
            )
        )
    return Table("Speed beside it, reading prompts included", headings, tuple(rows))


def _parts(result: TaskResult) -> Table:
    headings = ("category", "examples", "tokens a round", "repeated 4-grams, plain", "speculative", "same text")
    rows = [
        (
            part.category,
            str(part.examples),
            f"{part.tokens_per_round[SPECULATIVE]:.2f}",
            f"{part.repeated[PLAIN]:.1%}",
            f"{part.repeated[SPECULATIVE]:.1%}",
            NOTHING if part.agreement is None else str(part.agreement),
        )
        for part in result.parts
    ]
    return Table(f"{result.title} by category", headings, tuple(rows))


def _services(results: Sequence[TaskResult], settings: Mapping[str, Any]) -> Table:
    budget = settings["max_time"]
    within = "without a time budget" if budget is None else f"within {budget:g} s a call"
    title = f"As a service: {settings['num_sequences']} answers a prompt, {within}; ms a token"
    headings = (
        "task", "way", "finished", "Pass@First", "Pass@Finished", "Pass@All", "first", "last", "all",
    )  # fmt: skip
    rows = []
    for result in results:
        for way, service in (result.services or {}).items():
            shares = (service.pass_first, service.pass_finished, service.pass_all)
            passes = [f"{share:.1%}" if TASKS[result.task].is_pass else NOTHING for share in shares]
            seconds = (service.first_latency, service.last_latency, service.all_latency)
            latencies = [NOTHING if value is None else f"{1000 * value:.1f}" for value in seconds]
            rows.append((result.title, way, f"{service.finished:.0%}", *passes, *latencies))
    return Table(title, headings, tuple(rows))
