"""Loading, measuring, storing after every sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_steps.report import make_record
from benchmarks.cpu_steps.results import CpuResults, StepTimes
from benchmarks.cpu_steps.steps import BASELINES, KERNELS, STORED, TITLES, Grid, Method, Subject, methods, sweep
from forerun import kernels
from forerun.bench.hardware import measure_ceilings, work_of
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.provenance import busy_note, provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.turns import Turn, TurnsOutcome, take_turns


def check_grid(grid: Grid, context: int | None) -> None:
    """Refuse what cannot be measured."""
    if grid.past < (0 if grid.last_only else 1) or grid.repeats < 1:
        raise InvalidArgument(f"past={grid.past}, repeats={grid.repeats}: both must be at least 1")
    if context is not None and grid.past + max(grid.tokens) > context:
        raise InvalidArgument(
            f"{grid.past} keys and {max(grid.tokens)} new tokens do not fit the context of {context}; ask for fewer"
        )


def load_subjects(model: str, draft: str | None, narrow: Sequence[str] = ()) -> list[Subject]:
    """The target, and whatever can draft for it, in float32 on the CPU; the target's `narrow` forms beside it."""
    from forerun.loading import load_model

    target, _ = load_model(model, device="cpu", dtype="float32")
    subjects = [Subject("target", target, narrow={form: _narrow(model, form) for form in narrow})]
    return subjects if draft is None else [*subjects, _draft(draft, target)]


def _narrow(name: str, form: str) -> Any:
    from forerun.loading import load_model

    asked = {"dtype": STORED} if form == STORED else {"dtype": "float32", "quantize": form}
    return load_model(name, device="cpu", **asked)[0]


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


def run(
    model: str,
    draft: str | None,
    narrow: Sequence[str],
    grid: Grid,
    use: Kernels,
    output: Path,
    reporter: Reporter,
    command: Sequence[str],
) -> Record:
    """Sweep by sweep over all subjects, so that a slow minute does not hit one step alone; the first is a warm-up."""
    notes = [note for note in (busy_note(), _missing(use)) if note]
    reporter.start(f"loading {without_folders(model)}")
    subjects = load_subjects(model, draft, narrow)
    for subject in subjects:
        check_grid(grid, getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None))
    reporter.start("what this machine reads and multiplies at best")
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    use = Kernels.OFF if kernels.why_not_numba() else use
    origin = provenance("cpu", command)
    times: dict[tuple[str, str, int, int], list[float]] = {}
    prepared: dict[str, dict[str, Method]] = {}

    def fill(subject: Subject) -> None:
        prepared[subject.name] = methods(subject, grid, use)

    def one_sweep(subject: Subject, counts: bool) -> None:
        def keep(method: str, batch: int, tokens: int, seconds: float) -> None:
            if counts:
                times.setdefault((subject.name, method, batch, tokens), []).append(seconds)

        sweep(prepared[subject.name], grid, keep)

    def save(outcome: TurnsOutcome) -> Record:
        disturbed = busy_note("ended") if outcome.complete else None
        named = {"model": without_folders(model), "draft": without_folders(draft) if draft else None}
        results = CpuResults(
            provenance=origin,
            settings=named | {"kernels": str(use), **asdict(grid)},
            titles=_titles(use, narrow),
            ceilings=ceilings,
            work={subject.name: work_of(subject.model) for subject in subjects},
            steps=tuple(StepTimes(*step, tuple(seconds)) for step, seconds in times.items()),
            notes=tuple(notes if disturbed is None else [*notes, disturbed]),
        )
        return make_record(results, outcome.complete).kept(output)

    turns = [Turn(f"filling the caches of the {subject.name}", partial(fill, subject)) for subject in subjects]
    for repeat in range(1 + grid.repeats):
        for subject in subjects:
            title = f"{subject.name}, sweep {repeat}" if repeat else f"{subject.name}, warm-up"
            turns.append(Turn(title, partial(one_sweep, subject, repeat > 0)))
    return take_turns(turns, reporter, save)


def _titles(use: Kernels, narrow: Sequence[str]) -> dict[str, str]:
    """Of what is measured."""
    compiled = () if use is Kernels.OFF else (KERNELS, *narrow)
    return {name: title.format(use=use) for name, title in TITLES.items() if name in (*BASELINES, *compiled)}


def _missing(use: Kernels) -> str | None:
    reason = kernels.why_not_numba()
    return f"no kernels were measured ({reason})" if reason and use is not Kernels.OFF else None
