"""`forerun train data`: let the target write the text a drafter learns from."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import GroupedCommand, number, option, place_options
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.engine import Engine
    from forerun.train.prompts import Reading
    from forerun.train.shards import Manifest, ShardWriter
    from forerun.train.writing import Item, Limits, Tally, WritingSettings

PROMPTS, TEXT, OUTPUT, MACHINE = "Prompts", "What is written", "Where it goes, and when it stops", "Machine"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("target")
@option(
    PROMPTS,
    "--prompts",
    "-p",
    multiple=True,
    type=FILE,
    metavar="FILE",
    show_default=False,
    help="JSONL rows with prompt, text, question, instruction, turns or messages, or text, one prompt a line; may "
    "be .gz or .xz. May be given again.",
)
@option(PROMPTS, "--paragraphs", is_flag=True, help="Text files: one prompt a paragraph.")
@option(PROMPTS, "--strict", is_flag=True, help="A bad row is an error instead of being skipped.")
@option(
    PROMPTS,
    "--chat/--raw",
    default=None,
    show_default="the chat template where there is one",
    help="Give prompts as a user's turn, or as they are.",
)
@number(
    PROMPTS, "--max-prompt-tokens", default=1024, help="Longer prompts are left out: one of them makes room for all."
)
@option(
    PROMPTS,
    "--slice",
    "part",
    default="0/1",
    metavar="I/N",
    help="Take every N-th prompt from the I-th on; N processes with one folder share the work.",
)
@number(TEXT, "--max-new-tokens", least=8, default=256, help="At most so many a text.")
@option(TEXT, "--temperatures", default="0,0,0.7,1.0", metavar="T,T,...", help="The prompts take them in turn.")
@number(TEXT, "--samples-per-prompt", default=1, help="Texts for each prompt.")
@number(
    TEXT,
    "--top-k",
    least=0,
    metavar="K",
    default=0,
    help="Keep the target's K most likely tokens at each position, with their log-probabilities (6 K bytes each).",
)
@number(TEXT, "--seed", least=0, default=0, help="Another seed draws other texts.")
@option(
    OUTPUT,
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    show_default=False,
    help="Folder of shards. The same command again goes on where it stopped.",
)
@number(OUTPUT, "--tokens", show_default="all prompts", help="Stop after N tokens, prompts and all slices included.")
@option(
    OUTPUT,
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    show_default="no limit",
    help="Stop after M minutes, loading not included.",
)
@option(OUTPUT, "--disk-budget", default="2GiB", metavar="SIZE", help="Write at most that much, all slices together.")
@number(OUTPUT, "--shard-tokens", default=1_000_000, help="Tokens of one file: what a killed run loses at most.")
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@number(MACHINE, "--batch-size", default=512, help="Texts written at once.")
@place_options(MACHINE)
def data(target: str, **options: Any) -> None:  # fmt: skip
    """Let TARGET answer prompts in large batches and keep the texts as training data.

    A drafter is judged on the target's own text, so that is what it should learn from. Nothing depends on the batch:
    each text has random numbers of its own.
    """
    from forerun.cli.console import err_console, plain_warnings
    from forerun.files import check_output_folder
    from forerun.train.prompts import read_prompts

    console = err_console()
    check_output_folder(options["output"], "-o")
    part = _slice(options["part"])
    budget = _bytes(options["disk_budget"]) // part[1]
    temperatures = _temperatures(options["temperatures"])
    if not options["prompts"]:
        raise InvalidArgument("no prompts: give --prompts FILE")
    reading = read_prompts(options["prompts"], paragraphs=options["paragraphs"], strict=options["strict"])
    with plain_warnings(console):
        run = _prepare(target, options, part, budget, temperatures, reading, console)
        if reading.complaint:
            console.print(f"Note: {reading.complaint}", style="yellow", markup=False, soft_wrap=True)
        tally = _run(run, options, part, console)
    _print(tally, run.writer, options)


@dataclass(frozen=True, slots=True)
class DataRun:
    """Everything a run needs."""

    engine: Engine
    items: tuple[Item, ...]  # of all slices
    settings: WritingSettings
    writer: ShardWriter


def _prepare(
    target: str,
    options: dict[str, Any],
    part: tuple[int, int],
    budget: int,
    temperatures: tuple[float, ...],
    reading: Reading,
    console: Console,
) -> DataRun:
    from forerun.cli.console import busy
    from forerun.loading import load_model
    from forerun.train.prompts import encode_prompts, uses_template
    from forerun.train.shards import ShardWriter
    from forerun.train.teacher import teacher
    from forerun.train.writing import WritingSettings, stop_ids, wide_engine

    where = {name: options[name] for name in ("device", "dtype")}
    with busy(console, f"loading {target}"):
        model, tokenizer = load_model(target, **where, offline=options["offline"])
    template = uses_template(tokenizer, options["chat"])
    prompts = reading.prompts
    with busy(console, f"encoding {len(prompts)} prompts"):
        encoded = encode_prompts(tokenizer, prompts, template)
    settings = WritingSettings(
        max_new_tokens=options["max_new_tokens"],
        temperatures=temperatures,
        seed=options["seed"],
        batch_size=options["batch_size"],
        stop_ids=stop_ids(model),
    )
    manifest = _manifest(target, model, options, temperatures, template, encoded)
    top_k = options["top_k"]
    writer = ShardWriter(
        options["output"],
        manifest,
        part=part,
        shard_tokens=options["shard_tokens"],
        disk_budget=budget,
        teach=teacher(model, top_k) if top_k else None,
    )
    engine = wide_engine(model, tokenizer)
    items = _items(encoded, _longest(options, engine), options["samples_per_prompt"], console)
    return DataRun(engine, items, settings, writer)


def _longest(options: dict[str, Any], engine: Engine) -> int:
    """Prompt tokens that leave the context room for a text worth keeping."""
    from forerun.train.writing import SHORTEST

    limit = engine.target.context_length
    longest: int = options["max_prompt_tokens"]
    return longest if limit is None else min(longest, limit - SHORTEST)


def _items(encoded: list[tuple[int, ...]], longest: int, samples: int, console: Console) -> tuple[Item, ...]:
    """Numbers count all prompts, those left out too, so that they do not change with --max-prompt-tokens."""
    from forerun.train.writing import Item

    fitting = [(i, prompt) for i, prompt in enumerate(encoded) if 0 < len(prompt) <= longest]
    if left_out := len(encoded) - len(fitting):
        note = f"Note: {left_out} of {len(encoded)} prompts are longer than {longest} tokens, or empty, and left out"
        console.print(note, style="yellow")
    return tuple(Item(i * samples + copy, prompt) for i, prompt in fitting for copy in range(samples))


def _run(run: DataRun, options: dict[str, Any], part: tuple[int, int], console: Console) -> Tally:
    from forerun.cli.run import stop_on_interrupt
    from forerun.measure.progress import Bar
    from forerun.train.writing import write_shards

    index, count = part
    items = [item for item in run.items if item.number // options["samples_per_prompt"] % count == index]
    with stop_on_interrupt() as pressed, Bar(console) as bar:
        left = sum(item.number not in run.writer.done for item in items)
        gc.freeze()  # tens of thousands of prompts stay to the end: the collector need not look them over again
        if not left and not run.writer.num_sequences:
            raise InvalidArgument("nothing to write: this slice has no prompts; give more, or use fewer slices")

        bar.start("writing", total=left)
        shown = 0

        def tell(tally: Tally) -> None:
            nonlocal shown
            done = tally.sequences + tally.too_short + tally.failed
            bar.start(f"{tally.new_tokens} tokens, {tally.tokens_per_second:.0f}/s")
            bar.advance(done - shown)
            shown = done

        return write_shards(run.engine, items, run.writer, run.settings, _limits(options, part, pressed), tell)


def _limits(options: dict[str, Any], part: tuple[int, int], pressed: Any) -> Limits:
    from forerun.train.writing import Limits

    tokens = -(-options["tokens"] // part[1]) if options["tokens"] else None
    seconds = options["max_minutes"] * 60 if options["max_minutes"] else None
    return Limits(tokens=tokens, seconds=seconds, interrupted=pressed)


def _manifest(
    target: str,
    model: Any,
    options: dict[str, Any],
    temperatures: tuple[float, ...],
    template: bool,
    encoded: list[tuple[int, ...]],
) -> Manifest:
    """What decides the texts is compared when the command is repeated; the rest is for the record."""
    import hashlib
    from importlib.metadata import version

    from forerun.train.shards import Manifest
    from forerun.version import __version__

    config = model.config.get_text_config()
    about = {
        "name": Path(target).name if Path(target).exists() else target,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
    }
    names = ("max_new_tokens", "samples_per_prompt", "seed", "max_prompt_tokens")
    arguments = {name: options[name] for name in names} | {
        "temperatures": temperatures,
        "slices": _slice(options["part"])[1],
        "chat": template,
        "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(),
    }
    versions = {"forerun": __version__} | {name: version(name) for name in ("torch", "transformers")}
    return Manifest(about, options["top_k"], arguments, versions)


def _slice(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if index >= count:
        raise InvalidArgument(f"--slice {text!r}: write I/N with I from 0 to N - 1, such as 0/4")
    return index, count


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= value < float("inf") for value in found):
        raise InvalidArgument(f"--temperatures {text!r}: write numbers >= 0 with commas, such as 0,0.7,1")
    return found


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not found:
        raise InvalidArgument(f"--disk-budget {text!r}: write a size such as 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def _print(tally: Tally, writer: ShardWriter, options: dict[str, Any]) -> None:
    facts = {
        "ending": str(tally.ending),
        "sequences": tally.sequences,
        "tokens": tally.tokens,
        "new_tokens": tally.new_tokens,
        "seconds": round(tally.seconds, 1),
        "new_tokens_per_second": round(tally.tokens_per_second, 1),
        "repeated_4_grams": round(tally.repeated_share, 4),
        "ended_by_themselves": round(tally.stopped_share, 4),
        "too_short": tally.too_short,
        "failed": tally.failed,
        "sequences_in_folder": writer.num_sequences,
        "tokens_in_folder": writer.num_tokens,
        "bytes_in_folder": sum(entry.bytes for entry in writer.manifest.shards),
    }
    if options["as_json"]:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print_table(facts, str(options["output"]))


def _print_table(facts: dict[str, Any], folder: str) -> None:
    from rich.table import Table

    from forerun.cli.console import out_console

    table = Table(title=f"{folder}: {facts.pop('ending')}", title_justify="left", show_header=False)
    for name, value in facts.items():
        is_share = name in ("repeated_4_grams", "ended_by_themselves")
        table.add_row(name.replace("_", " "), f"{value:.1%}" if is_share else f"{value:,}")
    out_console().print(table)
