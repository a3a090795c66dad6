"""Findings as tables of text that anyone can print."""

from __future__ import annotations

from forerun.bench.records import Agreement
from forerun.eval.estimate import Estimate
from forerun.eval.methods import PLAIN, SPECULATIVE
from forerun.eval.record import EvalRecord, times_as_fast
from forerun.eval.summary import Comparison, TaskResult
from forerun.eval.tasks import TASKS
from forerun.measure.table import NOTHING, Table

TEXT_NOTE = (
    "{title}: nothing is decoded, so this is the target itself, the same for plain and speculative decoding. 'plain' "
    "reads long passes, 'speculative' blocks of eight tokens over the cache, as drafts are verified: they part by "
    "rounding only"
)


def tables(record: EvalRecord) -> list[Table]:
    found = record.findings
    shown = [_scores(record), _speeds(record)] if found else []
    shown += [_parts(finding) for finding in found if finding.parts]
    if any(finding.services for finding in found):
        shown.append(_services(record))
    return shown


def remarks(record: EvalRecord) -> list[str]:
    """Where the figures come from, and what to know before quoting them."""
    origin, machine, settings = record.provenance, record.provenance.machine, record.settings
    sampling = (
        f"temperature {settings['temperature']:g}, seed {settings['seed']}" if settings["temperature"] else "greedy"
    )
    lines = [
        f"{origin.date}, {machine.gpu or machine.cpu}, {machine.cores} cores, {machine.threads} threads; "
        + ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        + (f", commit {origin.commit}" if origin.commit else ""),
        f"model {settings['model']}, drafts by {settings['draft']}, rule {settings['rule']}, {sampling}",
    ]
    lines += [f"Note: {note}." for finding in record.findings for note in finding.notes]
    lines += [f"Note: {TEXT_NOTE.format(title=f.title)}." for f in record.findings if TASKS[f.task].is_text]
    lines += [f"Note: {note}." for note in record.notes]
    lines += [f"Left out: {missing.why}." for missing in record.missing]
    if not record.complete:
        lines.append("Interrupted: these are the calls that both ways had made until then.")
    return lines


def headline(record: EvalRecord) -> list[str]:
    """The line to read if one reads nothing else."""
    if not record.findings:
        return []
    names = ", ".join(finding.title for finding in record.differing)
    if names:
        return [f"Plain and speculative decoding DIFFER beyond noise on: {names}."]
    chance = 1 - record.findings[0].confidence
    return [
        f"No difference beyond noise on {len(record.findings)} task{'s' * (len(record.findings) > 1)} "
        f"(equal decoders would be told apart {chance:.0%} of the time, all tasks together)."
    ]


def markdown(table: Table) -> str:
    """For documents."""
    lines = [table.headings, ("---",) * len(table.headings), *table.rows]
    return f"**{table.title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _scores(record: EvalRecord) -> Table:
    first = record.findings[0]
    title = f"Scores with {first.confidence:.0%} confidence intervals"
    wider = f"{100 * first.difference_confidence:.4g} %"
    headings = ("task", "score", "examples", "plain", "speculative", f"difference ({wider})", "verdict")
    rows = [
        (finding.title, *_score(finding, comparison), finding.verdict if place == 0 else "")
        for finding in record.findings
        for place, comparison in enumerate(finding.comparisons)
    ]
    return Table(title, headings, tuple(rows))


def _score(finding: TaskResult, comparison: Comparison) -> tuple[str, ...]:
    of = f"{finding.examples} of {finding.total}" if finding.examples < finding.total else str(finding.examples)
    cells = (_interval(e, comparison.is_share) for e in (comparison.plain, comparison.speculative))
    return comparison.title, of, *cells, _interval(comparison.difference, comparison.is_share, sign="+")


def _interval(estimate: Estimate, is_share: bool, sign: str = "") -> str:
    scale, digits = (100, 1) if is_share else (1, 2)
    value = f"{estimate.value * scale:{sign}.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low * scale:{sign}.{digits}f}, {estimate.high * scale:{sign}.{digits}f}]"


def _speeds(record: EvalRecord) -> Table:
    headings = (
        "task", "plain tokens/s", "speculative", "times as fast", "tokens a round", "accepted", "same text",
    )  # fmt: skip
    rows = []
    for finding in record.findings:
        plain, drafted = finding.speeds[PLAIN], finding.speeds[SPECULATIVE]
        decodes = bool(drafted.rounds)
        ratio = times_as_fast(finding) if decodes else None
        rate = drafted.acceptance_rate
        rows.append(
            (
                finding.title,
                f"{plain.tokens_per_second:.1f}",
                f"{drafted.tokens_per_second:.1f}",
                NOTHING if ratio is None else f"{ratio:.2f}x",
                f"{drafted.tokens_per_round:.2f}" if decodes else NOTHING,
                NOTHING if rate is None else f"{rate:.0%}",
                _sameness(finding.agreement),
            )
        )
    return Table("Speed beside it, reading prompts included", headings, tuple(rows))


def _parts(finding: TaskResult) -> Table:
    headings = ("category", "examples", "tokens a round", "repeated 4-grams, plain", "speculative", "same text")
    rows = [
        (
            part.category,
            str(part.examples),
            f"{part.tokens_per_round[SPECULATIVE]:.2f}",
            f"{part.repeated[PLAIN]:.1%}",
            f"{part.repeated[SPECULATIVE]:.1%}",
            _sameness(part.agreement),
        )
        for part in finding.parts
    ]
    return Table(f"{finding.title} by category", headings, tuple(rows))


def _services(record: EvalRecord) -> Table:
    budget = record.settings["max_time"]
    within = "without a time budget" if budget is None else f"within {budget:g} s a call"
    title = f"As a service: {record.settings['num_sequences']} answers a prompt, {within}; ms a token"
    headings = (
        "task", "way", "finished", "Pass@First", "Pass@Finished", "Pass@All", "first", "last", "all",
    )  # fmt: skip
    rows = []
    for finding in record.findings:
        for way, found in (finding.services or {}).items():
            passes = (found.pass_first, found.pass_finished, found.pass_all)
            judged = [f"{share:.1%}" if TASKS[finding.task].is_pass else NOTHING for share in passes]
            latencies = (found.first_latency, found.last_latency, found.all_latency)
            shown = [NOTHING if value is None else f"{1000 * value:.1f}" for value in latencies]
            rows.append((finding.title, way, f"{found.finished:.0%}", *judged, *shown))
    return Table(title, headings, tuple(rows))


def _sameness(found: Agreement | None) -> str:
    if found is None:
        return NOTHING
    parts = [f"{found.identical} of {found.identical + found.ties + found.different}"]
    parts += [f"{found.ties} ties"] if found.ties else []
    parts += [f"{found.different} DIFFERENT"] if found.different else []
    return ", ".join(parts)
