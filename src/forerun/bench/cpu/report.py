"""The record of a run as tables of text."""

from __future__ import annotations

from typing import Any

from forerun.bench.cpu.expected import believed, costs, draft_length
from forerun.bench.cpu.record import CpuRecord, StepTimes
from forerun.measure.table import NOTHING, Table

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


def tables(record: CpuRecord) -> list[Table]:
    found = [_steps(record, subject, batch) for subject in record.work for batch in record.batches()]
    return [*found, _lengths(record)]


def remarks(record: CpuRecord) -> list[str]:
    machine, limits = record.provenance.machine, record.limits
    lines = [
        f"{machine.cpu}, {machine.threads} threads; {record.settings['past']} keys a row; median of "
        f"{record.settings['repeats']} (the least in brackets), and times transformers' one-token step at batch 1",
        f"Floor: weights, keys and values read once at {limits.bytes_per_second / 1e9:.1f} GB/s, or all operations at "
        f"{limits.operations_per_second / 1e9:.0f} GFLOP/s, whichever takes longer; both measured here",
    ]
    lines += [f"Note: {note}." for note in record.notes]
    return lines if record.complete else [*lines, "Interrupted: these are the steps that were measured until then."]


def summary(record: CpuRecord) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    return {
        subject: [
            {
                "way": step.way,
                "batch": step.batch,
                "tokens": step.tokens,
                "median_ms": 1000 * step.median,
                "least_ms": 1000 * step.least,
                "ratio": _ratio(record, step),
                "floor_ms": 1000 * record.floor(subject, step.batch, step.tokens),
            }
            for step in record.measurements
            if step.subject == subject
        ]
        for subject in record.work
    }


def _ratio(record: CpuRecord, step: StepTimes) -> float | None:
    unit = record.unit(step.subject)
    return None if unit is None else step.median / unit


def _steps(record: CpuRecord, subject: str, batch: int) -> Table:
    own = record.ways(subject)
    headings = ("tokens a row", *(record.titles[way] for way in own), "floor", "auto expects")
    learnt = costs(record, subject, own[-1]) if own else None
    rows = [
        (
            str(tokens),
            *(_cell(record, record.find(subject, way, batch, tokens)) for way in own),
            f"{1000 * record.floor(subject, batch, tokens):.1f}",
            NOTHING if learnt is None else _milliseconds(believed(learnt, batch, tokens)),
        )
        for tokens in record.tokens()
    ]
    return Table(f"{subject.capitalize()}, batch {batch}: milliseconds a step", headings, tuple(rows))


def _cell(record: CpuRecord, step: StepTimes | None) -> str:
    if step is None:
        return NOTHING
    ratio = _ratio(record, step)
    shown = NOTHING if ratio is None else f"{ratio:.2f}x"
    return f"{1000 * step.median:.1f} ({1000 * step.least:.1f}) {shown}"


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1000 * seconds:.1f}"


def _lengths(record: CpuRecord) -> Table:
    """Drafts that cost nothing, and drafts by the model that was measured beside the target."""
    target, *others = record.work
    title = "Draft length that auto would choose, by the chance that a drafted token is kept"
    rows = []
    for batch in record.batches():
        learnt = costs(record, target, record.ways(target)[-1])
        makers = [("free drafts", 0.0)]
        for other in others:
            step = record.find(other, record.ways(other)[-1], batch, 1) if record.ways(other) else None
            if step is not None:
                makers.append((other, step.median))
        rows += [
            (f"batch {batch}, {name}", *(str(draft_length(learnt, batch, a, cost)) for a in ACCEPTANCES))
            for name, cost in makers
        ]
    return Table(title, ("", *(f"{a:.0%}" for a in ACCEPTANCES)), tuple(rows))
