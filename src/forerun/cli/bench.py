"""`forerun bench`: measure speed against plain decoding and keep the record.

Alone it compares methods to decode. Another measurement is a command in a file of its own, named in `BENCHES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from forerun.bench.settings import CompareSettings
from forerun.cli.main import LazyCommand, LazyGroup
from forerun.cli.options import (
    RULE,
    NamesOptions,
    comma_separated,
    option,
    options_from,
    place_of,
    place_options,
    stack,
    typed_options,
)
from forerun.errors import InvalidArgument

BENCHES = {
    "decode": LazyCommand("forerun.cli.bench_decode:decode", "Time whole rounds of a pair, plainly and with drafts."),
    "serve": LazyCommand("forerun.cli.bench_serve:serve", "Load a server and time what its clients see."),
    "show": LazyCommand("forerun.cli.bench:show", "Print the tables of a stored record again."),
}
names, sizes = comma_separated(str), comma_separated(int)
PAPERS = "`python -m benchmarks.papers page` in a checkout writes its tables to docs/papers.md"
Function = TypeVar("Function", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)


class BenchGroup(NamesOptions, LazyGroup):
    """Its commands are imported when they are called, as those of `forerun` itself."""

    table = BENCHES
    title = "forerun bench"


def output_options(plot: str) -> Callable[[Function], Function]:
    """Where the record and the picture go."""
    return stack(
        option("Output", "--output", "-o", type=FILE, help="The record.",
               show_default="a new file in benchmarks/results of a checkout, else here"),
        option("Output", "--plot", "picture", type=FILE, show_default=False, help=plot),
    )  # fmt: skip


def questions_option(group: str) -> Callable[[Function], Function]:
    """Which prompts are asked."""
    return option(group, "--data", type=click.Path(exists=True, path_type=Path), help="Spec-Bench's question.jsonl.",
                  show_default="FORERUN_DATA, else our own prompts")  # fmt: skip


@click.group(cls=BenchGroup, invoke_without_command=True)
@options_from(
    CompareSettings, "What is compared", given_only=True,
    model={"flags": ("--model", "-m"), "metavar": "NAME"},
    draft={"flags": ("--draft", "-d"), "metavar": "DRAFTER", "show_default": "none"},
    methods={"metavar": "NAME,...", "show_default": "all that the models allow"},
    categories={"metavar": "NAME,...", "show_default": "all"},
    prompts_per_category={"show_default": "as many as fit --minutes"},
    temperature={"flags": ("--temperature", "-t")},
    rule=RULE,
    kernels={"show_default": "$FORERUN_KERNELS, else auto"},
    quantize={"metavar": "SCHEME,...", "show_default": "none"},
    prompt_lengths={"metavar": "N,...", "show_default": "none; 128,512 beside a peer"},
    peer={"show_default": "transformers"},
    llama_server={"metavar": "PATH", "show_default": "the one on the PATH, else the package llama_cpp"},
    tensor_parallel={"metavar": "N", "show_default": "1; of torchrun's, all"},
)  # fmt: skip
@questions_option("What is compared")
@option(
    "What is compared", "--quick", is_flag=True, help="Few prompts, two batch sizes, short texts: about two minutes."
)
@place_options("What is compared")
@output_options("Draw the ratios as a bar chart, too.")
@click.pass_context
def bench(ctx: click.Context, /, picture: Path | None, output: Path | None, **options: Any) -> None:  # fmt: skip
    """Measure Forerun against model.generate and transformers' own speculation, in one run and in turns.

    Tokens per second belong to a machine, so the tables show ratios to model.generate. Ctrl-C keeps what was measured.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from forerun.bench.compare import check, load_and_run
    from forerun.measure.show import measure

    where = {name: options.pop(name) for name in place_of(options)}
    asked = check(**options | {"model": options["model"] or "embedded"})
    ctx.exit(
        measure(
            "bench", output, picture,
            lambda path, reporter: load_and_run(asked, path, reporter, **where),
        )
    )  # fmt: skip


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--plot", "picture", type=FILE, help="Draw its picture, too.")
def show(record: Path, picture: Path | None) -> None:
    """Print the tables of a stored record again, whichever command wrote it."""
    from forerun.measure.record import load
    from forerun.measure.show import show as show_record

    stored = load(record)
    if not stored.tables:
        raise InvalidArgument(f"{str(record)!r} is a record of kind {stored.kind!r} without tables: {PAPERS}")
    show_record(stored, picture)


def _refuse_options(ctx: click.Context) -> None:
    """Options before a sub-command would be ignored, so they are refused."""
    if typed := typed_options(ctx):
        raise click.UsageError(
            f"{', '.join(typed)} belong to `forerun bench` alone, not to {ctx.invoked_subcommand!r}", ctx=ctx
        )
