"""`forerun eval`: is the text as good? Tasks with real scores, plain and speculative decoding side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import GroupedCommand, model_options, number, option, speculation_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.progress import Progress, TaskID

    from forerun.eval.record import EvalRecord
    from forerun.eval.settings import EvalSettings
    from forerun.measure.table import Table

TASKS, DECODING, SCORING, OUTPUT = "Tasks", "Decoding", "Scoring", "Output"
SOME_MISSING = 1
SETTINGS = (
    "model", "draft", "policy", "rule", "temperature", "top_p", "top_k", "seed", "limit", "batch_size",
    "num_sequences", "max_time", "max_new_tokens", "window", "code_seconds", "confidence", "k",
)  # fmt: skip
AT_LEAST_1 = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)


def counts(value: str) -> tuple[int, ...]:
    """`1,10`"""
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r}: give whole numbers with commas, such as 1,10") from None


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
@option(
    TASKS,
    "--limit",
    type=limit,
    metavar="N|all",
    default="100",
    help="Examples of each task, spread evenly over its file.",
)
@model_options
@speculation_options(policy="auto")
@option(
    DECODING,
    "--temperature",
    "-t",
    type=click.FloatRange(min=0),
    metavar="X",
    default=0.0,
    help="0 is greedy: then texts are compared token for token, too.",
)
@option(DECODING, "--top-p", type=float, show_default="1, off", help="Only the likeliest tokens up to this mass.")
@option(DECODING, "--top-k", type=int, metavar="K", show_default="off", help="Only the K likeliest tokens.")
@number(DECODING, "--seed", least=0, default=0, help="Of sampled answers.")
@option(
    DECODING, "--max-new-tokens", type=AT_LEAST_1, metavar="N", show_default="each task's own", help="Of an answer."
)
@option(
    DECODING,
    "--batch-size",
    type=AT_LEAST_1,
    metavar="N",
    show_default="8; one prompt at a time with --max-time",
    help="Sequences decoded together.",
)
@option(
    DECODING,
    "--num-sequences",
    type=AT_LEAST_1,
    metavar="N",
    default=1,
    help="Answers to each prompt; more than one gives pass@k and the measures of a service (Pass@First ...).",
)
@option(
    DECODING,
    "--max-time",
    type=SECONDS,
    metavar="SECONDS",
    show_default="no limit",
    help="Time budget of each call; answers that are not finished then do not count as finished.",
)
@option(
    SCORING, "--k", type=counts, metavar="K,...", default="", show_default="1 and --num-sequences", help="For pass@k."
)
@number(SCORING, "--window", least=4, default=1024, help="Tokens of a window of WikiText; the first half is context.")
@option(
    SCORING, "--code-seconds", type=SECONDS, metavar="SECONDS", default=5.0, help="For each generated program to run."
)
@option(SCORING, "--confidence", type=float, metavar="X", default=0.95, help="Of the intervals.")
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
    from forerun.config import data_folder
    from forerun.eval.settings import EvalSettings
    from forerun.eval.tasks import chosen

    if as_json and markdown:
        raise click.UsageError("--json and --markdown are two forms of the same: choose one")
    folder = data or data_folder()
    console = err_console(quiet)
    if not tasks:
        list_tasks(folder)
        return
    form = "json" if as_json else "markdown" if markdown else "table"
    if "asr" in tasks:
        from forerun.cli.eval_speech import evaluate_speech

        evaluate_speech(tasks, folder, output, form, options, console)
        return
    wanted = chosen(tasks)
    settings = EvalSettings(**_named(options))
    record, path = _evaluate(wanted, folder, output, settings, options, console)
    _show(record, path, form, console)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)
    if record.missing:
        raise click.exceptions.Exit(SOME_MISSING)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Settings for the record; where a model's folder lies is nobody's business."""
    from forerun.measure.provenance import without_folders

    named = {name: options[name] for name in SETTINGS}
    return named | {name: without_folders(named[name]) for name in ("model", "draft")}


def _evaluate(
    wanted: list[Any],
    folder: Path | None,
    output: Path | None,
    settings: EvalSettings,
    options: dict[str, Any],
    console: Console,
) -> tuple[EvalRecord, Path]:
    """Cheap mistakes first: data, packages and the output before anything large is loaded."""
    from forerun.cli.console import busy, progress_bar
    from forerun.cli.pair import load
    from forerun.errors import InvalidArgument
    from forerun.eval.job import carry_out, check_packages
    from forerun.eval.methods import both
    from forerun.eval.prepare import bad_rows, find
    from forerun.files import check_output
    from forerun.measure.record import default_path

    with busy(console, "reading tasks"):
        found, missing = find(wanted, folder)
    for lack in missing:
        console.print(f"Left out: {lack.why}", style="red", markup=False, soft_wrap=True)
    if not found:
        raise InvalidArgument(missing[0].why if len(missing) == 1 else "no task has its data; see above")
    for task in found:
        for note in bad_rows(task):
            console.print(f"Note: {note}", style="yellow", markup=False, soft_wrap=True)
    check_packages([task.task for task in found])
    path = output or default_path(prefix="eval")
    check_output(path)
    loaded = load(options, console, encoder_decoder=True)
    ways = both(
        loaded.model,
        loaded.drafter,
        tokenizer=loaded.tokenizer,
        policy=loaded.policy,
        rule=loaded.rule,
        attention=loaded.attention,
        kernels=loaded.kernels,
        compile=loaded.compile,
    )
    with progress_bar(console) as bar:
        listener = Bar(bar)
        command = ["forerun", *sys.argv[1:]]
        return carry_out(ways, found, missing, settings, path, listener, command, loaded.tokenizer), path


class Bar:
    """A bar that counts calls."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task: TaskID = bar.add_task("starting", total=None)

    def planned(self, steps: int, done: int) -> None:
        self.bar.update(self.task, total=steps, completed=done)

    def doing(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def done(self) -> None:
        self.bar.advance(self.task)


def list_tasks(folder: Path | None) -> None:
    """Every task, and whether its data was found."""
    from forerun.eval.prepare import find
    from forerun.eval.tasks import TASKS as EVERY

    found, missing = find(list(EVERY.values()), folder)
    sources = {entry.task.name: entry.reading.source for entry in found}
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


def _show(record: EvalRecord, path: Path, form: str, console: Console) -> None:
    from forerun.cli.console import out_console
    from forerun.eval.record import journal_path, summary
    from forerun.eval.report import markdown, tables

    if not record.findings:
        console.print("Stopped before both ways had answered anything.")
    elif form == "json":
        click.echo(json.dumps({**asdict(record), "summary": summary(record)}, indent=1, allow_nan=False))
    elif form == "markdown":
        click.echo("\n\n".join(markdown(table) for table in tables(record)))
    else:
        print_record(record, out_console())
    if not record.complete:
        console.print("To go on: the same command with " + f"--output {path}", markup=False, soft_wrap=True)
    if record.findings:
        console.print(f"Record: {path}; answers: {journal_path(path)}", markup=False, soft_wrap=True)


def show_eval(record: EvalRecord, picture: Path | None) -> None:
    """`forerun bench show` of such a record."""
    from forerun.cli.console import out_console
    from forerun.errors import InvalidArgument

    if picture is not None:
        raise InvalidArgument("--plot draws records of speed; this one holds scores: leave it out")
    print_record(record, out_console())


def print_record(record: EvalRecord, console: Console) -> None:
    from forerun.eval.report import headline, remarks, tables

    print_findings(tables(record), remarks(record), headline(record), console)


def print_findings(tables: Sequence[Table], remarks: Sequence[str], headline: Sequence[str], console: Console) -> None:
    """Tables, what to know of them, and last what to read if one reads nothing else."""
    for table in tables:
        print_table_or_text(table, console)
    for line in remarks:
        console.print(line, style="dim", markup=False, soft_wrap=True)
    for line in headline:
        console.print(line, style="bold", markup=False, soft_wrap=True)


def print_table_or_text(table: Table, console: Console) -> None:
    """With lines where there is room for them; else as plain text that nobody folds in the middle of a word."""
    from forerun.cli.bench import print_table

    text = table.text()
    if max(map(len, text.splitlines())) + len(table.headings) + 1 <= console.width:
        print_table(table, console)
    else:
        console.print(text, markup=False, soft_wrap=True)
        console.print()
