"""From a loaded pair and the data of tasks to a stored record."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.eval.journal import Journal, journal_path
from forerun.eval.methods import DecoderMethod
from forerun.eval.prepare import MissingTask, Prepared, prepare
from forerun.eval.report import eval_record
from forerun.eval.run import CompareTexts, answer_all
from forerun.eval.sandbox.run import run_program
from forerun.eval.settings import EvalSettings
from forerun.eval.summary import TaskResult, summarise
from forerun.eval.tasks import TASKS, Task, TaskData
from forerun.eval.windows import read, tolerance
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance
from forerun.measure.record import Record
from forerun.measure.reference import Reading, decoder_start, difference
from forerun.models.scorer import Scorer

KERNEL_WALLS = ("landlock", "seccomp")


def check_packages(tasks: Sequence[Task]) -> None:
    """Scorers are optional; better said now than after an hour of decoding."""
    for task in tasks:
        if task.needs is not None and importlib.util.find_spec(task.needs) is None:
            raise InvalidArgument(
                f"task {task.name!r} needs {task.needs}, which is not installed; run: pip install 'forerun[eval]'"
            )


def sandbox_notes(tasks: Sequence[Task]) -> list[str]:
    """Try the sandbox before programs are to run in it, and say what it consists of."""
    if not any(task.runs_code for task in tasks):
        return []
    walls = run_program("pass").walls
    note = f"generated programs ran behind: {', '.join(walls)}"
    if not set(KERNEL_WALLS) <= set(walls):
        note += (
            ". This kernel does not offer both Landlock and seccomp, so careless programs are stopped and hostile ones "
            "may not be: use a container"
        )
    return [note]


def evaluate(
    methods: tuple[DecoderMethod, DecoderMethod],
    tasks: Sequence[TaskData],
    missing: Sequence[MissingTask],
    settings: EvalSettings,
    output: Path,
    reporter: Reporter,
    tokenizer: Any,
    pair: Mapping[str, Any],
) -> Record:
    """Answer, score, store. Ctrl-C and failures leave what was answered; the same command goes on from there.

    `pair` is what `pair_identity` says of the models: other answers than theirs are not gone on with.
    """
    target = methods[0].decoder.target
    scorer = methods[0].decoder.engine.target
    journal = Journal(journal_path(output), {**settings.identity, **pair})
    origin = provenance(target.device)
    notes = sandbox_notes([data.task for data in tasks])
    notes += [lossy for method in methods if (lossy := method.decoder.engine.lossy) is not None]
    notes += _policy_notes(methods[1], settings)
    if (ranks := methods[0].decoder.ranks) is not None:
        notes.append(f"the target was split over {ranks.size} processes")
    if journal.resumed:
        notes.append(f"resumed after {journal.resumed} calls, so not all times are of one sitting")
    prefix = _prefix(target, [data.task for data in tasks]) if target.config.is_encoder_decoder else None
    prepared = [prepare(data, tokenizer, scorer.context_length, settings, prefix) for data in tasks]
    reads_text = any(task.windows for task in prepared)
    complete = False
    try:
        complete = answer_all(
            prepared,
            methods,
            settings,
            journal,
            compare=_text_comparison(target, settings),
            reader=partial(read, Scorer(target, use=scorer.kernels)) if reads_text else None,
            reporter=reporter,
        )
    finally:
        results = _results(prepared, journal, settings, target.dtype)
        record = eval_record(origin, asdict(settings), results, missing, notes, complete).kept(output)
    return record


def _policy_notes(method: DecoderMethod, settings: EvalSettings) -> list[str]:
    """Sampled answers name a seed, so that they can be had again: a policy with a clock may leave those to another."""
    drafting = method.decoder.engine.drafting
    if settings.temperature == 0 or drafting.drafter is None:
        return []
    chosen = drafting.policy_for_seed()
    if chosen is drafting.policy:
        return []
    return [
        f"sampled answers name a seed, so policy {settings.policy!r} left their draft lengths to "
        f"{type(chosen.unwrapped).__name__}, which measures no time; `forerun bench` measures the speed of sampling"
    ]


def _prefix(target: Any, tasks: Sequence[Task]) -> str:
    """What an encoder reads before a document that is to be summarised, by the model's own configuration."""
    if unfit := [task.name for task in tasks if not task.reads_document]:
        raise InvalidArgument(
            f"task {unfit[0]!r} needs a causal model, and {type(target).__name__} has an encoder; of the tasks it can "
            f"do {', '.join(name for name, task in TASKS.items() if task.reads_document)}"
        )
    known = getattr(target.config, "task_specific_params", None) or {}
    return str(known.get("summarization", {}).get("prefix", ""))


def _results(
    prepared: Sequence[Prepared], journal: Journal, settings: EvalSettings, dtype: Any
) -> tuple[TaskResult, ...]:
    every = [
        summarise(task, journal, settings, len(prepared), lambda perplexity: tolerance(dtype, perplexity))
        for task in prepared
    ]
    return tuple(result for result in every if result is not None)


def _text_comparison(target: Any, settings: EvalSettings) -> CompareTexts | None:
    """Greedy texts are compared token for token; a time budget cuts them at different places."""
    if settings.temperature > 0 or settings.max_time is not None:
        return None

    def compare(prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> str:
        if target.config.is_encoder_decoder:
            parting = difference(Reading(target, prompt), [decoder_start(target)], drafted, plain)
        else:
            parting = difference(target, prompt, drafted, plain)
        return "identical" if parting is None else "ties" if parting.is_tie else "different"

    return compare
