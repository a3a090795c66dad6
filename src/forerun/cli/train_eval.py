"""`forerun train eval` and `forerun train compare`: what trained drafts are worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import GroupedCommand, option, options_from, place_of, place_options, settings_from
from forerun.train.options import EvaluateOptions

if TYPE_CHECKING:
    from rich.console import Console

DECODING, MACHINE = "Decoding", "Machine"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("eval", cls=GroupedCommand)
@click.argument("target")
@click.argument("folder", type=FOLDER)
@option(
    DECODING,
    "--prompts",
    "--file",
    "-p",
    "-f",
    "prompts",
    type=FILE,
    metavar="FILE",
    required=True,
    show_default=False,
    help="Prompts the draft was not trained on; rows with category and turns (Spec-Bench) are told apart.",
)
@options_from(EvaluateOptions, DECODING, limit={"show_default": "all"})
@option(
    DECODING,
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="eval.json in FOLDER",
    help="Where the record is kept.",
)
@option(DECODING, "--json", "as_json", is_flag=True, help="Print the record as JSON instead of tables.")
@place_options(MACHINE)
def evaluate(target: str, folder: Path, prompts: Path, output: Path | None, as_json: bool, **options: Any) -> None:
    """Decode held-out prompts with the draft in FOLDER and say what it is worth.

    Prints tables and keeps the record as eval.json in the folder: tokens per round, acceptance by position and the
    share of repeated 4-grams (text that goes in circles is easy to draft), overall and by category; the cost of a draft
    step over that of a target step; and whether the draft will pay on this machine.
    """
    from forerun.cli.console import busy, err_console
    from forerun.files import check_output
    from forerun.loading import load_model
    from forerun.train.report import NAME

    console = err_console()
    settings = settings_from(EvaluateOptions, options)
    output = output or folder / NAME
    check_output(output, "-o")
    with busy(console, f"loading {target}"):
        model, tokenizer = load_model(target, **place_of(options))
    run_evaluation(model, tokenizer, folder, prompts, settings, console, output, as_json)


def run_evaluation(
    target: Any,
    tokenizer: Any,
    folder: Path,
    prompts: Path,
    settings: EvaluateOptions,
    console: Console,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Decode, keep the record (as eval.json in the folder, if nothing else is said), print it."""
    from forerun.measure.progress import Bar
    from forerun.measure.provenance import provenance
    from forerun.measure.show import show_as
    from forerun.train.evaluate import evaluate, read_prompts_by_category
    from forerun.train.report import NAME

    held_out = read_prompts_by_category(prompts, tokenizer, settings.limit)
    origin = provenance(target.device)
    with Bar(console) as bar:
        bar.start("decoding", total=len(held_out) * len(settings.temperatures))
        record = evaluate(target, tokenizer, folder, held_out, settings, origin, prompts.name, bar.advance)
    record.save(output or folder / NAME)
    show_as(record, "json" if as_json else "table")


@click.command(cls=GroupedCommand)
@click.argument("runs", nargs=-1, required=True, type=FOLDER)
@option(
    "Output",
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="none",
    help="Draw acceptance by position into this .png, .svg or .pdf.",
)
@option("Output", "--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(runs: tuple[Path, ...], plot: Path | None, as_json: bool) -> None:  # fmt: skip
    """Put trained drafts side by side: RUNS are their folders, each with the eval.json of the same prompts."""
    from forerun.cli.console import out_console
    from forerun.measure.plot import check_plot, draw
    from forerun.measure.table import print_tables
    from forerun.train.report import comparison_figure, comparison_table, read_run

    if plot is not None:
        check_plot(plot)
    compared = [read_run(folder) for folder in runs]
    if as_json:
        click.echo(json.dumps([asdict(run) for run in compared], indent=1))
    else:
        print_tables([comparison_table(compared)], out_console())
    if plot is not None:
        draw(comparison_figure(compared), plot)
