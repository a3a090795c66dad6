"""`forerun check`: test that a target and a drafter give exactly the target's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.checks.settings import CheckSettings
from forerun.cli.options import (
    GroupedCommand,
    model_options,
    option,
    options_from,
    parallel_options,
    prompts_option,
    settings_from,
    speculation_options,
)
from forerun.config import num_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.checks.suite import CheckReport

TEST, OUTPUT = "Test", "Output"


@click.command(cls=GroupedCommand)
@model_options
@parallel_options("Model")
@speculation_options(policy="4")
@prompts_option(
    TEST, "built-in texts",
    "Prompts for the tests of greedy text and of rows: one a line, or JSONL; taken as bare text.",
)  # fmt: skip
@options_from(
    CheckSettings,
    TEST,
    "samples",
    "alpha",
    "temperature",
    "top_k",
    "max_new_tokens",
    "seed",
    top_k={"metavar": "K"},
)
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON.")
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Only the exit code: 0 passed, 1 not.")
def check(file: Path | None, **options: Any) -> None:  # fmt: skip
    """Test on your own pair that drafts change nothing but the speed.

    Greedy text is compared with model.generate; sampled text with the target's exact law by chi-square tests, after a
    deliberately wrong sampler has shown that they can fail; rows of a batch with the same rows alone. A lossy --rule
    always fails, with how far its law lies from the target's.
    """
    from forerun.checks.suite import check as run_checks
    from forerun.cli.console import err_console
    from forerun.cli.pair import load
    from forerun.measure.progress import Bar

    settings = settings_from(CheckSettings, options)
    console = err_console(options["quiet"])
    prompts = None if file is None else _texts(file)
    loaded = load(options, console)
    with Bar(console) as bar:
        report = run_checks(
            loaded.model,
            loaded.drafter,
            tokenizer=loaded.tokenizer,
            prompts=prompts,
            settings=settings,
            reporter=bar,
            **loaded.settings,
        )
    _print(report, options)
    if not report.passed:
        raise click.exceptions.Exit(1)


def _texts(file: Path) -> list[str]:
    from forerun.cli.prompts import read_prompts

    return [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in read_prompts((), file)]


def _print(report: CheckReport, options: dict[str, Any]) -> None:
    from forerun.cli.console import out_console

    if options["as_json"]:
        subject = {name: options[name] for name in ("model", "draft", "tree", "policy", "rule")}
        subject["tensor_parallel"] = num_ranks(options["tensor_parallel"])
        click.echo(json.dumps(subject | report.as_dict(), indent=2, allow_nan=False))
    elif not options["quiet"]:
        _print_table(report, out_console(), options)


def _print_table(report: CheckReport, console: Console, options: dict[str, Any]) -> None:
    from forerun.measure.table import Table, print_tables

    split = "" if (size := num_ranks(options["tensor_parallel"])) == 1 else f" split over {size} processes"
    drafts = f"drafts by {options['draft']}, rule {options['rule']}, policy {options['policy']}"
    title = f"{options['model']}{split}, {drafts}"
    rows = [(finding.name, str(finding.outcome), finding.summary) for finding in report.findings]
    failed = [place for place, row in enumerate(rows) if row[1] == "FAILED"]
    table = Table(title, ("test", "verdict", "what was seen"), tuple(rows), alarming=tuple(failed), last_is_text=True)
    print_tables([table], console)
    console.print(report.verdict, style="green" if report.passed else "red", markup=False)
