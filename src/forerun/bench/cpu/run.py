"""Loading, measuring, storing: the whole of `forerun bench cpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun import kernels
from forerun.bench.cpu.floors import measure_limits
from forerun.bench.cpu.record import CpuRecord, StepTimes
from forerun.bench.cpu.report import summary
from forerun.bench.cpu.steps import KERNELS, TITLES, Grid, Subject, Way, sweep, ways
from forerun.bench.listening import Listener
from forerun.bench.records import write
from forerun.bench.work import work_of
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.measure.provenance import busy_note, provenance, without_folders

Times = dict[tuple[str, str, int, int], list[float]]


def check_grid(grid: Grid, context: int | None) -> None:
    """Refuse what cannot be measured."""
    if grid.past < 1 or grid.repeats < 1:
        raise InvalidArgument(f"past={grid.past}, repeats={grid.repeats}: both must be at least 1")
    if context is not None and grid.past + max(grid.tokens) > context:
        raise InvalidArgument(
            f"{grid.past} keys and {max(grid.tokens)} new tokens do not fit the context of {context}; ask for fewer"
        )


def load_subjects(model: str, draft: str | None) -> list[Subject]:
    """The target, and whatever can draft for it, in float32 on the CPU."""
    from forerun.loading import load_model

    target, _ = load_model(model, device="cpu", dtype="float32")
    found = [Subject("target", target)]
    return found if draft is None else [*found, _draft(draft, target)]


def _draft(name: str, target: Any) -> Subject:
    from forerun.drafters import DraftModel, from_folder
    from forerun.loading import load_model
    from forerun.loading.drafter_folder import is_drafter_folder
    from forerun.models.scorer import Scorer

    if not is_drafter_folder(name):
        return Subject("draft", load_model(name, device="cpu", dtype="float32")[0])
    drafter: Any = from_folder(name)
    drafter.bind(Scorer(target, use=Kernels.OFF))
    if isinstance(drafter, DraftModel):
        return Subject("draft", drafter.scorer.model)
    return Subject("draft head's body", drafter.trunk.body.model, headless=True)


def carry_out(
    model: str,
    draft: str | None,
    grid: Grid,
    use: Kernels,
    output: Path,
    listener: Listener,
    command: Sequence[str],
) -> CpuRecord:
    """Ctrl-C ends it; what was measured until then is stored."""
    notes = [note for note in (busy_note(), _missing(use)) if note]
    listener.starting(f"loading {without_folders(model)}")
    subjects = load_subjects(model, draft)
    for subject in subjects:
        check_grid(grid, getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None))
    listener.starting("what this machine reads and multiplies at best")
    limits = measure_limits()
    use = Kernels.OFF if kernels.why_not_numba() else use
    origin = provenance("cpu", command)
    times: Times = {}

    def record(complete: bool) -> CpuRecord:
        if disturbed := busy_note("ended"):
            notes.append(disturbed)
        named = {"model": without_folders(model), "draft": without_folders(draft) if draft else None}
        return CpuRecord(
            provenance=origin,
            settings=named | {"kernels": str(use), **{n: _plain(v) for n, v in asdict(grid).items()}},
            titles={way: title.format(use=use) for way, title in TITLES.items() if way != KERNELS or use != "off"},
            limits=limits,
            work={subject.name: work_of(subject.model) for subject in subjects},
            complete=complete,
            measurements=tuple(StepTimes(*step, tuple(seconds)) for step, seconds in times.items()),
            notes=tuple(notes),
        )

    return _measured(subjects, grid, use, times, listener, record, output)


def _measured(
    subjects: Sequence[Subject],
    grid: Grid,
    use: Kernels,
    times: Times,
    listener: Listener,
    record: Callable[[bool], CpuRecord],
    output: Path,
) -> CpuRecord:
    """Sweep by sweep over all subjects, so that a slow minute does not hit one step alone."""
    complete = False
    try:
        prepared = _prepared(subjects, grid, use, listener)
        steps = sum(len(each) for _, each in prepared) * len(grid.batches) * len(grid.tokens)
        listener.starting("measuring", (1 + grid.repeats) * steps)
        for repeat in range(1 + grid.repeats):
            for subject, each in prepared:
                _one_sweep(subject, each, grid, times if repeat else {}, listener)
        complete = True
    except KeyboardInterrupt:
        pass
    made = record(complete)
    if made.measurements:
        write(made, output, summary(made))
    return made


def _prepared(
    subjects: Sequence[Subject], grid: Grid, use: Kernels, listener: Listener
) -> list[tuple[Subject, dict[str, Way]]]:
    found = []
    for subject in subjects:
        listener.starting(f"filling the caches of the {subject.name}")
        found.append((subject, ways(subject, grid, use)))
    return found


def _one_sweep(subject: Subject, each: dict[str, Way], grid: Grid, times: Times, listener: Listener) -> None:
    def keep(way: str, batch: int, tokens: int, seconds: float) -> None:
        times.setdefault((subject.name, way, batch, tokens), []).append(seconds)
        listener.advance()

    sweep(each, grid, keep, lambda what: listener.starting(f"{subject.name}: {what}"))


def _missing(use: Kernels) -> str | None:
    reason = kernels.why_not_numba()
    return f"no kernels were measured ({reason})" if reason and use is not Kernels.OFF else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
