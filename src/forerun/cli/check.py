"""`forerun check`: test that a target and a drafter give exactly the target's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import GroupedCommand, model_options, option, speculation_options

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.check import CheckSettings, Pair, Report

TEST, OUTPUT = "Test", "Output"
COLOURS = {"passed": "green", "FAILED": "red", "untested": "yellow"}


@click.command(cls=GroupedCommand)
@model_options
@speculation_options(policy="4")
@option(
    TEST,
    "--file",
    "-f",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    show_default="built-in texts",
    help="Prompts for the tests of greedy text and of rows: one a line, or JSONL; taken as bare text. '-' reads "
    "standard input.",
)
@option(
    TEST,
    "--samples",
    type=int,
    metavar="N",
    default=512,
    help="Continuations drawn; four times as many see half the error.",
)
@option(TEST, "--alpha", type=float, default=1e-3, help="Chance that the whole command fails a pair that is exact.")
@option(TEST, "--temperature", type=float, default=1.0, help="Of the sampled tests.")
@option(TEST, "--top-k", type=click.IntRange(min=0), metavar="K", default=8, help="Of the sampled tests; 0 is off.")
@option(TEST, "--max-new-tokens", type=int, metavar="N", default=24, help="Tokens of each greedy text.")
@option(
    TEST, "--seed", type=click.IntRange(min=0), metavar="N", default=0, help="Another seed draws other continuations."
)
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON.")
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Only the exit code: 0 passed, 1 not.")
def check(file: Path | None, **options: Any) -> None:  # fmt: skip
    """Test on your own pair that drafts change nothing but the speed.

    Greedy text is compared with model.generate; sampled text with the target's exact law by chi-square tests, after a
    deliberately wrong sampler has shown that they can fail; rows of a batch with the same rows alone. A lossy --rule
    always fails, with how far its law lies from the target's.
    """
    from forerun.check import CheckSettings, Pair, check_pair
    from forerun.cli.console import err_console, progress_bar
    from forerun.cli.pair import load
    from forerun.rules import parse

    names = ("samples", "alpha", "temperature", "top_k", "max_new_tokens", "seed")
    settings = CheckSettings(**{name: options[name] for name in names})
    console = err_console(options["quiet"])
    loaded = load(options, console)
    pair = Pair(
        loaded.model,
        loaded.drafter,
        loaded.policy,
        parse(loaded.rule),
        loaded.tokenizer,
        loaded.attention,
        loaded.kernels,
        loaded.compile,
    )
    prompts, open_prompts = _prompts(file, loaded.tokenizer)
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total, refresh=True)

        report = check_pair(pair, prompts, open_prompts, settings, tell)
    _print(report, pair, options)
    if not report.passed:
        raise click.exceptions.Exit(1)


def _prompts(file: Path | None, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    from forerun.check.suite import OPEN_PROMPTS, PROMPTS
    from forerun.cli.prompts import encode, read_prompts

    given = list(PROMPTS) if file is None else read_prompts((), file)
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in given]
    return [encode(tokenizer, text, False) for text in texts], [encode(tokenizer, text, False) for text in OPEN_PROMPTS]


def _print(report: Report, pair: Pair, options: dict[str, Any]) -> None:
    from forerun.cli.console import out_console

    if options["as_json"]:
        subject = {name: options[name] for name in ("model", "draft", "tree", "policy", "rule")}
        click.echo(json.dumps(subject | report.as_dict(), indent=2, allow_nan=False))
    elif not options["quiet"]:
        _print_table(report, out_console(), options)


def _print_table(report: Report, console: Console, options: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{options['model']}, drafts by {options['draft']}, rule {options['rule']}, policy {options['policy']}"
    table = Table("Test", "Verdict", "What was seen", title=title, title_justify="left")
    for finding in report.findings:
        table.add_row(finding.name, Text(finding.outcome, COLOURS[finding.outcome]), Text(finding.summary))
        table.add_section()
    console.print(table)
    console.print(_verdict(report, report.settings), markup=False)


def _verdict(report: Report, settings: CheckSettings) -> str:
    rate = f"A pair that is exact fails this command by chance {settings.alpha:g} of the time, over all seeds."
    if report.passed:
        return f"Passed. {rate}"
    if any(finding.outcome == "FAILED" for finding in report.findings):
        return f"FAILED: this pair does not give exactly the target's text. {rate}"
    return "Nothing failed, but a test marked 'untested' had nothing to judge: no drafts, or too few samples."
