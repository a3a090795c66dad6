"""`forerun eval`: is the text as good? Tasks with real scores, plain and speculative decoding side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import (
    GroupedCommand,
    model_options,
    option,
    options_from,
    parallel_options,
    settings_from,
    speculation_options,
)
from forerun.errors import InvalidArgument
from forerun.eval.settings import EvalSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.measure.record import Record

TASKS, DECODING, SCORING, OUTPUT = "Tasks", "Decoding", "Scoring", "Output"
SOME_MISSING = 1


def limit(value: str) -> int | None:
    """A number, or `all`."""
    if value == "all":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r}: give a number of at least 1, or 'all'")
    return int(value)


@click.command("eval", cls=GroupedCommand)
@click.argument("tasks", nargs=-1)
@option(
    TASKS,
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    show_default="$FORERUN_DATA",
    help="The folder with the tasks' files; `forerun eval` alone lists what it finds there.",
)
@options_from(EvalSettings, TASKS, "limit", limit={"type": limit, "metavar": "N|all", "default": "100"})
@model_options
@parallel_options("Model")
@speculation_options(policy="auto")
@options_from(
    EvalSettings,
    DECODING,
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_new_tokens",
    "batch_size",
    "num_sequences",
    "max_time",
    temperature={"flags": ("--temperature", "-t")},
    top_p={"show_default": "1, off"},
    top_k={"metavar": "K", "show_default": "off"},
    max_new_tokens={"show_default": "each task's own"},
    batch_size={"show_default": "8; one prompt at a time with --max-time"},
    max_time={"metavar": "SECONDS", "show_default": "no limit"},
)
@options_from(
    EvalSettings, SCORING, "k", "window", "code_seconds", "confidence",
    k={"metavar": "K,...", "show_default": "1 and --num-sequences"},
    code_seconds={"metavar": "SECONDS"},
)  # fmt: skip
@option(
    OUTPUT,
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.json",
    show_default="benchmarks/results/eval-DATE.json of a checkout, else here",
    help="The record. Answers are kept beside it as they come; given again, a killed run goes on there.",
)
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print the record as JSON instead of tables.")
@option(OUTPUT, "--markdown", is_flag=True, help="Print the tables as Markdown.")
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def evaluate(
    tasks: tuple[str, ...],
    data: Path | None,
    output: Path | None,
    as_json: bool,
    markdown: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Score the same model with plain and with speculative decoding, and say whether they differ beyond noise.

    TASKS are one or more of xsum, cnn_dailymail (ROUGE), humaneval, mbpp (pass@k, programs run in a sandbox), gsm8k
    (exact match), wikitext2 (perplexity), spec_bench (no gold answers: repetition, length, identity), or all.
    Without any, the tasks are listed with what is needed to run them.

    asr is run by itself, with a speech recogniser (whisper-tiny.en by default): word error rate, tokens a round and
    seconds of encoder and decoder, by transformers, plainly and with drafts, at batch sizes 1, 4 and 8.
    """
    from forerun.cli.console import err_console
    from forerun.config import data_folder, rank_and_size
    from forerun.eval.tasks import chosen

    if as_json and markdown:
        raise click.UsageError("--json and --markdown are two forms of the same: choose one")
    folder = data or data_folder()
    if folder is not None and not folder.is_dir():
        raise InvalidArgument(f"{str(folder)!r} is no folder: name the one that holds the tasks' files (--data)")
    console = err_console(quiet)
    if not tasks:
        if rank_and_size()[0] == 0:
            list_tasks(folder)
        return
    form = "json" if as_json else "markdown" if markdown else "table"
    if "asr" in tasks:
        from forerun.cli.eval_speech import evaluate_speech

        evaluate_speech(tasks, folder, output, form, options, console)
        return
    wanted = chosen(tasks)
    settings = settings_from(EvalSettings, options, limit=options["limit"], **_names(options))
    record, path = _evaluate(wanted, folder, output, settings, options, console)
    _show(record, path, form, console)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)
    if record.details["missing"]:
        raise click.exceptions.Exit(SOME_MISSING)


def _names(options: dict[str, Any]) -> dict[str, str]:
    """What the record calls the models; where a model's folder lies is nobody's business."""
    from forerun.measure.provenance import without_folders

    return {name: without_folders(options[name]) for name in ("model", "draft")}


def _evaluate(
    wanted: list[Any],
    folder: Path | None,
    output: Path | None,
    settings: EvalSettings,
    options: dict[str, Any],
    console: Console,
) -> tuple[Record, Path]:
    """Cheap mistakes first: data, packages and the output before anything large is loaded."""
    from forerun.cli.console import busy, note, say
    from forerun.cli.pair import load
    from forerun.eval.evaluate import check_packages, evaluate
    from forerun.eval.journal import pair_identity
    from forerun.eval.methods import both
    from forerun.eval.prepare import bad_rows, find
    from forerun.files import check_output
    from forerun.measure.progress import Bar
    from forerun.measure.record import default_path

    with busy(console, "reading tasks"):
        tasks, missing = find(wanted, folder)
    if not tasks and len(missing) == 1:
        raise InvalidArgument(missing[0].why)
    for lack in missing:
        say(console, f"Left out: {lack.why}", style="red")
    if not tasks:
        raise InvalidArgument("no task has its data; see above")
    for task in tasks:
        for complaint in bad_rows(task):
            note(console, complaint)
    check_packages([task.task for task in tasks])
    path = output or default_path(prefix="eval")
    check_output(path)
    loaded = load(options, console, encoder_decoder=True)
    methods = both(loaded.model, loaded.drafter, tokenizer=loaded.tokenizer, **loaded.settings)
    with Bar(console) as bar:
        pair = pair_identity(options, loaded.model.device)
        return evaluate(methods, tasks, missing, settings, path, bar, loaded.tokenizer, pair), path


def list_tasks(folder: Path | None) -> None:
    """Every task, and whether its data was found."""
    from forerun.eval.prepare import find
    from forerun.eval.tasks import TASKS as EVERY

    ready, missing = find(list(EVERY.values()), folder)
    sources = {entry.task.name: entry.source for entry in ready}
    for name, task in EVERY.items():
        click.echo(f"{name:15}{', '.join(metric.title for metric in task.metrics)}")
        click.echo(" " * 15 + (f"found {sources[name]}" if name in sources else f"needs {task.give}"))
    click.echo(f"{'asr':15}word error rate, by itself")
    click.echo(" " * 15 + _recordings(folder))
    if missing:
        click.echo(f"Data is looked for in {str(folder)!r}." if folder else "Give --data FOLDER, or set FORERUN_DATA.")
    click.echo("Run some: forerun eval xsum gsm8k, or: forerun eval all")


def _recordings(folder: Path | None) -> str:
    from forerun.errors import InvalidArgument
    from forerun.eval.speech.recordings import GIVE, find

    try:
        return f"found {len(find(folder).recordings)} recordings"
    except InvalidArgument:
        return f"needs {GIVE}"


def _show(record: Record, path: Path, form: str, console: Console) -> None:
    from forerun.cli.console import say
    from forerun.eval.journal import journal_path
    from forerun.measure.show import show_as

    if not record.rows:
        console.print("Stopped before both ways had answered anything.")
    else:
        show_as(record, form)
    if not record.complete:
        say(console, f"To go on: the same command with --output {path}")
    if record.rows:
        say(console, f"Record: {path}; answers: {journal_path(path)}")
