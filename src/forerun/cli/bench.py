"""`forerun bench`: measure speed against plain decoding and keep the record.

Alone it compares ways to decode. For another measurement write a command in a file of its own and name it in `BENCHES`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from forerun.cli.main import INTERRUPTED, LazyCommand
from forerun.cli.options import KERNELS, KERNELS_HELP, RULE_HELP, rule_text
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.plan import Plan
    from forerun.bench.records import Record
    from forerun.measure.table import Table

BENCHES = {
    "attention": LazyCommand(
        "forerun.cli.bench_attention:attention", "Time attention over ragged rows on a GPU, form by form."
    ),
    "cpu": LazyCommand("forerun.cli.bench_cpu:cpu", "Time steps of a few tokens on the CPU, beside the floors."),
    "decode": LazyCommand("forerun.cli.bench_decode:decode", "Time whole rounds of a pair, plainly and with drafts."),
    "kernels": LazyCommand("forerun.cli.bench_kernels:kernels", "Time verification on a GPU, logits to tokens."),
    "seq2seq": LazyCommand("forerun.cli.bench_seq2seq:seq2seq", "Time encoder-decoder pairs, plainly and with drafts."),
    "show": LazyCommand("forerun.cli.bench:show", "Print the tables of a stored record again."),
}
# By the kind of a record: who reads it, and who prints what was read.
SHOWN = {
    "asr": ("forerun.eval.speech.record:read", "forerun.cli.eval_speech:show_speech"),
    "attention": ("forerun.bench.attention.record:read", "forerun.cli.bench_attention:show_attention"),
    "cpu steps": ("forerun.bench.cpu.record:read", "forerun.cli.bench_cpu:show_cpu"),
    "decode": ("forerun.bench.records:read", "forerun.cli.bench:show_speed"),
    "decode rounds": ("forerun.bench.decode.record:read", "forerun.cli.bench_decode:show_decode"),
    "eval": ("forerun.eval.record:read", "forerun.cli.eval:show_eval"),
    "kernels": ("forerun.bench.kernels.record:read", "forerun.cli.bench_kernels:show_kernels"),
    "plan": ("forerun.plan.record:read", "forerun.cli.plan:show_plan"),
    "seq2seq": ("forerun.bench.seq2seq.record:read", "forerun.cli.bench_seq2seq:show_seq2seq"),
}
# Records that this command does not show, and the one that does.
PAGE = "`python -m benchmarks.papers page` in a checkout writes its tables to docs/papers.md"
ELSEWHERE = {"paper table": PAGE, "trees": PAGE}


class BenchGroup(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return BENCHES[cmd_name].load() if cmd_name in BENCHES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in BENCHES.items()])


def names(value: str) -> tuple[str, ...]:
    """`a,b,c`"""
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not found:
        raise click.BadParameter(f"{value!r} names nothing; give one or more, separated by commas")
    return found


def sizes(value: str) -> tuple[int, ...]:
    """`1,4,8`"""
    found = names(value)
    if not all(part.isdecimal() and int(part) > 0 for part in found):
        raise click.BadParameter(f"{value!r}: give whole numbers of at least 1, separated by commas, such as 1,4,8")
    return tuple(map(int, found))


FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(cls=BenchGroup, invoke_without_command=True)
@click.option("--model", default="embedded", show_default=True, help="Hub name, folder, GGUF file or 'embedded'.")
@click.option(
    "--draft", metavar="MODEL", help="A smaller model with the same tokenizer; adds the methods that need one."
)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="Spec-Bench's question.jsonl [default: FORERUN_DATA, else our own prompts].",
)
@click.option(
    "--methods",
    type=names,
    metavar="NAME,...",
    help="To compare with model.generate: lookup, assisted, forerun-plain, forerun, forerun-draft, forerun-random.",
)
@click.option(
    "--categories",
    type=names,
    metavar="NAME,...",
    help="Which kinds of prompts, parts of MT-bench such as 'coding' included [default: all].",
)
@click.option("--batch-sizes", type=sizes, metavar="N,...", help="[default: 1,4,8]")
@click.option(
    "--prompts-per-category", metavar="N", type=click.IntRange(min=1), help="[default: as many as fit --minutes]"
)
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    help="For every prompt; end tokens are ignored. [default: 128]",
)
@click.option("--temperature", metavar="X", type=click.FloatRange(min=0), help="[default: 0, greedy]")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="For sampling. [default: 0]")
@click.option("--rule", metavar="RULE", type=rule_text, help=f"{RULE_HELP} [default: token]")
@click.option(
    "--repeats", metavar="N", type=click.IntRange(min=1), help="Measure everything that many times. [default: 1]"
)
@click.option(
    "--minutes",
    metavar="X",
    type=click.FloatRange(min=0, min_open=True),
    help="Choose the number of prompts to take about that long. [default: 15]",
)
@click.option("--quick", is_flag=True, help="Few prompts, two batch sizes, short texts: about two minutes.")
@click.option("--kernels", type=KERNELS, help=f"{KERNELS_HELP} [default: $FORERUN_KERNELS, else auto]")
@click.option("--device", help="[default: a GPU where there is one]")
@click.option("--dtype", help="[default: bfloat16 on a GPU, float32 elsewhere]")
@click.option(
    "--output", type=FILE, help="The record [default: benchmarks/results/bench-DATE.json of a checkout, else here]."
)
@click.option("--plot", "picture", type=FILE, help="Draw the ratios as a bar chart, too.")
@click.pass_context
def bench(ctx: click.Context, /, picture: Path | None, device: str | None, dtype: str | None, **options: Any) -> None:
    """Measure Forerun against model.generate and transformers' own speculation, in one run and in turns.

    Tokens per second belong to a machine, so the tables show ratios to model.generate. Ctrl-C keeps what was measured.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from rich.console import Console

    from forerun.bench.job import carry_out, check
    from forerun.bench.plot import plot
    from forerun.measure.plot import check_plot

    if picture is not None:
        check_plot(picture)
    job = check(**options)
    err = Console(stderr=True)
    if job.questions.note:
        err.print(job.questions.note, style="yellow", markup=False, highlight=False)
    with RichListener(err) as listener:
        record = carry_out(job, listener, ["forerun", *sys.argv[1:]], device=device, dtype=dtype)
    _finish(record, job.output, err)
    if picture is not None and record.measurements:
        plot(record, picture)
        err.print(f"Picture: {picture}", markup=False, highlight=False)
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--plot", "picture", type=FILE, help="Draw the ratios as a bar chart, too.")
def show(record: Path, picture: Path | None) -> None:
    """Print the tables of a stored record again; `forerun plan` and `forerun eval` write records, too."""
    from forerun.bench.records import content_of, damaged
    from forerun.measure.plot import check_plot

    kind = content_of(record).get("kind")
    if not isinstance(kind, str) or kind not in SHOWN:
        how = ELSEWHERE.get(str(kind), f"this version shows {', '.join(SHOWN)}")
        raise InvalidArgument(f"{str(record)!r} is a record of kind {kind!r}: {how}")
    read, print_it = map(_named, SHOWN[kind])
    if picture is not None:
        check_plot(picture)
    with damaged(record):
        print_it(read(record), picture)


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def show_speed(record: Record, picture: Path | None) -> None:
    from rich.console import Console

    from forerun.bench.plot import plot

    print_record(record, Console())
    if picture is not None:
        plot(record, picture)


def print_record(record: Record, console: Console) -> None:
    from forerun.bench.report import headline, remarks, tables

    for table in tables(record):
        print_table(table, console)
    for line in remarks(record):
        console.print(line, style="dim", markup=False, highlight=False)
    for line in headline(record):
        console.print(line, style="bold", markup=False, highlight=False)


def print_table(table: Table, console: Console) -> None:
    from rich.table import Table as Drawn

    from forerun.bench.report import OVERALL

    drawn = Drawn(title=table.title, title_justify="left")
    for place, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in table.rows:
        if row[0] == OVERALL:
            drawn.add_section()
        drawn.add_row(*row, style="bold" if row[0] == OVERALL else None)
    console.print(drawn, markup=False)


def _finish(record: Record, output: Path, err: Console) -> None:
    from rich.console import Console

    if not record.measurements:
        err.print("Stopped before anything was measured.")
        return
    print_record(record, Console())
    err.print(f"Record: {output}", markup=False, highlight=False, soft_wrap=True)


def _refuse_options(ctx: click.Context) -> None:
    """Options before a sub-command would be ignored, so they are refused."""
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} belong to `forerun bench` alone, not to {ctx.invoked_subcommand!r}", ctx=ctx
        )


class RichListener:
    """A spinner while preparing, then a bar whose length is the expected time."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = console
        self.bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            speed_estimate_period=600,
        )
        self.task = self.bar.add_task("starting", total=None)

    def __enter__(self) -> RichListener:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def planned(self, plan: Plan) -> None:
        minutes = plan.total_seconds / 60
        self.console.print(
            f"{len(plan.groups)} groups of prompts, {plan.prompts_per_category} prompts a category: "
            f"about {minutes:.1f} minutes (if every contender were as fast as model.generate)",
            markup=False,
            highlight=False,
        )
        self.bar.reset(self.task, total=plan.total_seconds)

    def starting(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def finished(self, expected_seconds: float) -> None:
        self.bar.advance(self.task, expected_seconds)
