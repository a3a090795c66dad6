"""`forerun train data`: let the target write the text a drafter learns from."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import (
    GroupedCommand,
    comma_separated,
    option,
    options_from,
    place_of,
    place_options,
    settings_from,
)
from forerun.errors import InvalidArgument
from forerun.train.options import SHORTEST, DataOptions, WritingSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.engine import Engine
    from forerun.train.shards import Manifest, ShardWriter
    from forerun.train.writing import Item, Tally

PROMPTS, TEXT, OUTPUT, MACHINE = "Prompts", "What is written", "Where it goes, and when it stops", "Machine"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("target")
@option(
    PROMPTS,
    "--prompts",
    "--file",
    "-p",
    "-f",
    "prompts",
    multiple=True,
    type=FILE,
    metavar="FILE",
    show_default=False,
    help="JSONL rows with prompt, text, question, instruction, turns or messages, or text, one prompt a line; may "
    "be .gz or .xz. May be given again.",
)
@options_from(
    DataOptions,
    PROMPTS,
    *("paragraphs", "strict", "chat", "max_prompt_tokens", "slice"),
    chat={"flags": ("--chat/--raw",), "show_default": "the chat template where there is one"},
    slice={"metavar": "I/N"},
)
@options_from(
    WritingSettings,
    TEXT,
    *("max_new_tokens", "temperatures"),
    max_new_tokens={"type": click.IntRange(min=SHORTEST)},
    temperatures={"type": comma_separated(float, repeats=True)},
)
@options_from(DataOptions, TEXT, "samples_per_prompt", "top_k", top_k={"metavar": "K"})
@options_from(WritingSettings, TEXT, "seed")
@option(
    OUTPUT,
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    show_default=False,
    help="Folder of shards. The same command again goes on where it stopped.",
)
@options_from(
    DataOptions,
    OUTPUT,
    *("tokens", "max_minutes", "disk_budget", "shard_tokens"),
    tokens={"show_default": "all prompts"},
    max_minutes={"metavar": "M", "show_default": "no limit"},
    disk_budget={"metavar": "SIZE"},
)
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@options_from(WritingSettings, MACHINE, "batch_size")
@place_options(MACHINE)
def data(
    target: str,
    prompts: tuple[Path, ...],
    output: Path,
    as_json: bool,
    check: Callable[[Any], None] | None = None,
    **options: Any,
) -> None:
    """Let TARGET answer prompts in large batches and keep the texts as training data.

    A drafter is measured on the target's own text, so that is what it should learn from. Nothing depends on the batch:
    each text has random numbers of its own.
    """
    from forerun.cli.console import busy, err_console, note, plain_warnings
    from forerun.files import check_output_folder
    from forerun.loading import load_model
    from forerun.prompts import uses_template
    from forerun.train.prompts import encode_reading, read_prompts
    from forerun.train.shards import ShardWriter
    from forerun.train.teacher import teacher
    from forerun.train.writing import WritingEnd, stop_ids, wide_engine

    console = err_console()
    check_output_folder(output, "-o")
    asked, writing = settings_from(DataOptions, options), settings_from(WritingSettings, options)
    if not prompts:
        raise InvalidArgument("no prompts: give --prompts FILE")
    reading = read_prompts(prompts, paragraphs=asked.paragraphs, strict=asked.strict)
    with plain_warnings(console):
        with busy(console, f"loading {target}"):
            model, tokenizer = load_model(target, **place_of(options))
        if check is not None:  # of a command that needs the data: whether it could do anything with it
            check(model)
        template = uses_template(tokenizer, asked.chat, off="--raw")
        with busy(console, f"encoding {len(reading.prompts)} prompts"):
            encoded, reading = encode_reading(reading, tokenizer, template, strict=asked.strict)
        writing = replace(writing, stop_ids=stop_ids(model))
        writer = ShardWriter(
            output,
            _manifest(target, model, asked, writing, template, encoded),
            part=asked.slice_of_prompts,
            shard_tokens=asked.shard_tokens,
            disk_budget=asked.disk_bytes // asked.slice_of_prompts[1],
            teach=teacher(model, asked.top_k) if asked.top_k else None,
        )
        engine = wide_engine(model, tokenizer)
        items = _items(encoded, asked, writing, engine.target.context_length, console)
        if reading.complaint:
            note(console, reading.complaint)
        tally = _write(engine, items, writer, asked, writing, console)
    _print(tally, writer, output, as_json)
    if tally.ending is WritingEnd.INTERRUPTED:
        console.print("Stopped by Ctrl-C: the same command goes on from here.", style="yellow")
        raise click.exceptions.Exit(INTERRUPTED)


def _items(
    encoded: list[tuple[int, ...]],
    asked: DataOptions,
    writing: WritingSettings,
    context_length: int | None,
    console: Console,
) -> list[Item]:
    """The texts of this slice. Numbers count all prompts, those left out too: they do not change with
    --max-prompt-tokens."""
    from forerun.cli.console import note
    from forerun.train.writing import items_of

    longest = asked.max_prompt_tokens
    if context_length is not None:  # leave room for a text worth keeping
        longest = min(longest, context_length - SHORTEST)
    fitting = [(place, prompt) for place, prompt in enumerate(encoded) if 0 < len(prompt) <= longest]
    if left_out := len(encoded) - len(fitting):
        note(console, f"{left_out} of {len(encoded)} prompts are longer than {longest} tokens, or empty, and left out")
    index, count = asked.slice_of_prompts
    samples = asked.samples_per_prompt
    mine = [(place, prompt) for place, prompt in fitting if place % count == index]
    items = [item for place, prompt in mine for item in items_of(place, prompt, samples, writing.temperatures)]
    if same := len(mine) * samples - len(items):
        note(console, f"{same} texts are left out: they would be a prompt's second greedy one, the same as its first")
    return items


def _write(
    engine: Engine,
    items: list[Item],
    writer: ShardWriter,
    asked: DataOptions,
    writing: WritingSettings,
    console: Console,
) -> Tally:
    from forerun.cli.run import stop_on_interrupt
    from forerun.measure.progress import Bar
    from forerun.train.writing import WritingLimits, write_shards

    left = sum(item.number not in writer.done for item in items)
    if not left and not writer.num_sequences:
        raise InvalidArgument("nothing to write: this slice has no prompts; give more, or use fewer slices")
    with stop_on_interrupt() as pressed, Bar(console) as bar, _uncollected():
        bar.start("writing", total=left)
        shown = 0

        def tell(tally: Tally) -> None:
            nonlocal shown
            done = tally.sequences + tally.too_short + tally.failed
            bar.start(f"{tally.new_tokens} tokens, {tally.tokens_per_second:.0f}/s")
            bar.advance(done - shown)
            shown = done

        limits = WritingLimits(
            tokens=-(-asked.tokens // asked.slice_of_prompts[1]) if asked.tokens else None,
            seconds=asked.max_minutes * 60 if asked.max_minutes else None,
            interrupted=pressed,
        )
        return write_shards(engine, items, writer, writing, limits, tell)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Tens of thousands of prompts stay to the end: the collector need not look them over again."""
    gc.freeze()
    try:
        yield
    finally:  # the target is among what is frozen, and must be let go of before another is loaded
        gc.unfreeze()


def _manifest(
    target: str,
    model: Any,
    asked: DataOptions,
    writing: WritingSettings,
    template: bool,
    encoded: list[tuple[int, ...]],
) -> Manifest:
    """What decides the texts is compared when the command is repeated; the rest is for the record."""
    import hashlib
    from importlib.metadata import version

    from forerun.loading.drafter_folder import describe_target
    from forerun.train.shards import Manifest
    from forerun.version import __version__

    arguments = {
        "max_new_tokens": writing.max_new_tokens,
        "samples_per_prompt": asked.samples_per_prompt,
        "seed": writing.seed,
        "max_prompt_tokens": asked.max_prompt_tokens,
        "temperatures": writing.temperatures,
        "slices": asked.slice_of_prompts[1],
        "chat": template,
        "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(),
    }
    versions = {"forerun": __version__} | {name: version(name) for name in ("torch", "transformers")}
    name = Path(target).name if Path(target).exists() else target
    return Manifest(describe_target(model) | {"name": name}, asked.top_k, arguments, versions)


def _print(tally: Tally, writer: ShardWriter, output: Path, as_json: bool) -> None:
    from forerun.cli.console import out_console
    from forerun.measure.table import Table, print_tables

    facts: dict[str, Any] = {
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
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    title = f"{output}: {facts.pop('ending')}"
    shares = ("repeated_4_grams", "ended_by_themselves")
    rows = [
        (name.replace("_", " "), f"{value:.1%}" if name in shares else f"{value:,}") for name, value in facts.items()
    ]
    print_tables([Table(title, ("", "this run and the folder"), tuple(rows))], out_console())
