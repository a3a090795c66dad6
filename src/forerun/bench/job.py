"""From what a user asks for to a measured and stored record; used by the command and by `python -m forerun.bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.methods import Bench, check_methods, default_methods
from forerun.bench.prompts import Questions, find_questions
from forerun.bench.records import Record, write
from forerun.bench.report import summary
from forerun.bench.run import Listener, Settings, run
from forerun.files import check_output
from forerun.measure.provenance import without_folders
from forerun.measure.record import default_path

QUICK: dict[str, Any] = {
    "categories": ("mt_bench", "summarization", "math_reasoning"),
    "batch_sizes": (1, 4),
    "prompts_per_category": 1,
    "max_new_tokens": 64,
}
"""What `--quick` changes, where nothing else was asked for: about two minutes instead of a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class Job:
    """A comparison that has been checked as far as possible without loading a model."""

    settings: Settings
    questions: Questions
    output: Path
    model: str
    draft: str | None


def check(
    *,
    model: str,
    draft: str | None = None,
    data: Path | None = None,
    output: Path | None = None,
    methods: Sequence[str] | None = None,
    quick: bool = False,
    **chosen: Any,
) -> Job:
    """Refuse whatever can be refused now. `chosen` are fields of `Settings`; None stands for the default."""
    names = check_methods(methods, draft is not None) if methods else default_methods(draft is not None)
    fields = {**(QUICK if quick else {}), **{name: value for name, value in chosen.items() if value is not None}}
    settings = Settings(
        model=without_folders(model), draft=without_folders(draft) if draft else None, methods=names, **fields
    )
    questions = find_questions(data)
    for category in settings.categories:
        questions.of(category)
    output = output or default_path()
    check_output(output)
    return Job(settings, questions, output, model, draft)


def carry_out(job: Job, listener: Listener, command: Sequence[str], **where: Any) -> Record:
    """Load, measure, store. `where` goes to `load_model`: device, dtype."""
    from forerun.loading import load_model

    listener.starting(f"loading {job.settings.model}")
    target, tokenizer = load_model(job.model, **where)
    draft, draft_tokenizer = load_model(job.draft, **where) if job.draft else (None, None)
    settings = job.settings
    bench = Bench(
        target, tokenizer, settings.temperature, settings.seed, draft, draft_tokenizer,
        kernels=settings.kernels, rule=settings.rule,
    )  # fmt: skip
    return run(
        job.settings,
        bench,
        job.questions,
        listener,
        save=lambda record: write(record, job.output, summary(record)),
        command=command,
    )
