"""Results as a record: steps beside their floors, the draft lengths that follow from them, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import stdev

from benchmarks.cpu_steps.expected import believed, costs, draft_length
from benchmarks.cpu_steps.results import CpuResults, StepTimes
from benchmarks.cpu_steps.steps import KERNELS, MODULES, NARROW, TRANSFORMERS
from forerun.measure.plot import BLUE, GREY, PALE_GREY, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


KIND = "cpu steps"
COLOURS = {TRANSFORMERS: GREY, MODULES: BLUE, KERNELS: RED}  # narrow weights: the picture's own, in turn
MARKERS = {TRANSFORMERS: "s", MODULES: "^", KERNELS: "o"}


def make_record(results: CpuResults, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(step) for step in results.steps],
        details={
            "titles": results.titles,
            "ceilings": asdict(results.ceilings),
            "work": {name: asdict(work) for name, work in results.work.items()},
        },
        tables=tables(results) if results.steps else (),
        remarks=remarks(results, complete),
        figure=figure(results) if results.steps else None,
        complete=complete,
    )


def tables(results: CpuResults) -> tuple[Table, ...]:
    steps = [_steps(results, subject, batch) for subject in results.work for batch in results.batches()]
    shares = [_shares(results, subject) for subject in results.work if _narrow(results, subject)]
    return (*steps, *shares, _lengths(results))


def figure(results: CpuResults) -> Figure:
    """Rows of panels are subjects, columns batch sizes; what no program can go below is shaded."""
    subjects, batches = [s for s in results.work if results.methods(s)], results.batches()
    machine = results.provenance.machine
    title = (
        f"{results.settings['model']}, float32, {results.settings['past']} keys in the cache; {machine.cpu}, "
        f"{machine.threads} threads; bars: one standard deviation of the repeats"
    )
    panels = tuple(_panel(results, subject, batch) for subject in subjects for batch in batches)
    return Figure(title, panels, columns=len(batches), panel_size=(3.7, 3.2))


def _panel(results: CpuResults, subject: str, batch: int) -> Panel:
    tokens = tuple(map(float, results.tokens()))
    floor = tuple(1000 * results.floor(subject, batch, int(t)) for t in tokens)
    series = [Series("below what the hardware allows", tokens, floor, "below", PALE_GREY)]
    for method in results.methods(subject):
        steps = [step for t in results.tokens() if (step := results.find(subject, method, batch, t)) is not None]
        series.append(
            Series(
                results.titles[method],
                tuple(float(step.tokens) for step in steps),
                tuple(1000 * step.median for step in steps),
                colour=COLOURS.get(method),
                marker=MARKERS.get(method, "d"),
                error=tuple(1000 * stdev(step.seconds) if len(step.seconds) > 1 else 0.0 for step in steps),
                values="%.0f" if method == KERNELS else "",
            )
        )
    return Panel(
        f"{subject}, batch {batch}", "new tokens a row", "ms a step", tuple(series), x_ticks=tokens, x_scale="log"
    )


def remarks(results: CpuResults, complete: bool) -> tuple[str, ...]:
    machine, ceilings = results.provenance.machine, results.ceilings
    lines = (
        f"{machine.cpu}, {machine.threads} threads; {results.settings['past']} keys a row; median of "
        f"{results.settings['repeats']} (the least in brackets), and times transformers' one-token step at batch 1",
        f"Floor: weights, keys and values read once at {ceilings.linear / 1e9:.1f} GB/s, or all operations at "
        f"{ceilings.operations / 1e9:.0f} GFLOP/s, whichever takes longer; both measured here",
        *(f"Note: {note}." for note in results.notes),
    )
    return lines if complete else (*lines, "Interrupted: these are the steps that were measured until then.")


def _ratio(results: CpuResults, step: StepTimes) -> float | None:
    unit = results.unit(step.subject)
    return None if unit is None else step.median / unit


def _steps(results: CpuResults, subject: str, batch: int) -> Table:
    methods = results.methods(subject)
    headings = ("tokens a row", *(results.titles[method] for method in methods), "floor", "auto expects")
    learnt = costs(results, subject, _ours(methods)) if methods else None
    rows = [
        (
            str(tokens),
            *(_cell(results, results.find(subject, method, batch, tokens)) for method in methods),
            f"{1000 * results.floor(subject, batch, tokens):.1f}",
            NOTHING if learnt is None else _milliseconds(believed(learnt, batch, tokens)),
        )
        for tokens in results.tokens()
    ]
    return Table(f"{subject.capitalize()}, batch {batch}: milliseconds a step", headings, tuple(rows))


def _shares(results: CpuResults, subject: str) -> Table:
    """What narrow weights save: medians over that of the same kernels with float32."""
    rows = []
    for batch in results.batches():
        for tokens in results.tokens():
            wide = results.find(subject, KERNELS, batch, tokens)
            steps = [results.find(subject, method, batch, tokens) for method in _narrow(results, subject)]
            cells = [NOTHING if wide is None or s is None else f"{s.median / wide.median:.2f}" for s in steps]
            rows.append((f"batch {batch}, {tokens} new", *cells))
    headings = ("step", *(results.titles[method] for method in _narrow(results, subject)))
    return Table(f"{subject.capitalize()}: share of the step with float32 weights", headings, tuple(rows))


def _narrow(results: CpuResults, subject: str) -> list[str]:
    return [method for method in results.methods(subject) if method in NARROW]


def _ours(methods: Sequence[str]) -> str:
    """The method a decoder would use for the float32 model."""
    return next(method for method in (KERNELS, MODULES, *methods) if method in methods)


def _cell(results: CpuResults, step: StepTimes | None) -> str:
    if step is None:
        return NOTHING
    ratio = _ratio(results, step)
    shown = NOTHING if ratio is None else f"{ratio:.2f}x"
    return f"{1000 * step.median:.1f} ({1000 * step.least:.1f}) {shown}"


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1000 * seconds:.1f}"


def _lengths(results: CpuResults) -> Table:
    """Drafts that cost nothing, and drafts by the model that was measured beside the target."""
    target, *others = results.work
    title = "Draft length that auto would choose, by the chance that a drafted token is kept"
    rows = []
    for batch in results.batches():
        learnt = costs(results, target, _ours(results.methods(target)))
        makers = [("free drafts", 0.0)]
        for other in others:
            methods = results.methods(other)
            step = results.find(other, _ours(methods), batch, 1) if methods else None
            if step is not None:
                makers.append((other, step.median))
        rows += [
            (f"batch {batch}, {name}", *(str(draft_length(learnt, batch, a, cost)) for a in ACCEPTANCES))
            for name, cost in makers
        ]
    return Table(title, ("", *(f"{a:.0%}" for a in ACCEPTANCES)), tuple(rows))
