"""`forerun train ngram`: count an n-gram table from text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import GroupedCommand, option, options_from, settings_from
from forerun.errors import InvalidArgument
from forerun.train.options import NgramOptions

if TYPE_CHECKING:
    from forerun.drafters import NgramTable

INPUT, TABLE = "Input", "Table"
FILE_NAME = "ngram.safetensors"


@click.command(cls=GroupedCommand)
@click.argument("text", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@option(
    INPUT,
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    show_default="none",
    help="A folder that `forerun train data` wrote: what the target said is counted, its prompts are not.",
)
@option(INPUT, "--model", "-m", default="embedded", metavar="NAME", help="The target whose tokens are counted.")
@option(INPUT, "--paragraphs", is_flag=True, help="Text files: n-grams end with the paragraph, not with the line.")
@option(INPUT, "--offline", is_flag=True, help="Use only what is on this machine.")
@options_from(NgramOptions, TABLE)
@option(
    TABLE,
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    show_default=False,
    help=f"A file, or a folder, in which it will be {FILE_NAME}.",
)
def ngram(text: tuple[Path, ...], data: Path | None, output: Path, **options: Any) -> None:  # fmt: skip
    """Count a table from TEXT files (as `train data` reads them), or from the target's own text.

    Use it with --draft ngram:FILE.
    """
    from forerun.cli.console import busy, err_console
    from forerun.files import check_output
    from forerun.loading import load_tokenizer

    if not text and data is None:
        raise InvalidArgument("no text: name some files, or a folder of shards with --data")
    settings = settings_from(NgramOptions, options)
    path = _place(output)
    check_output(path, "-o")
    console = err_console()
    with busy(console, "counting"):
        tokenizer = load_tokenizer(options["model"], offline=options["offline"])
        sequences = [*_of_files(text, tokenizer, options["paragraphs"], console), *_of_shards(data, len(tokenizer))]
        table = _count(sequences, tokenizer, settings)
        table.save(path)
    size = path.stat().st_size
    click.echo(f"{path}: order {table.order}, {sum(map(len, sequences)):,} tokens counted, {size:,} bytes")


def _of_files(paths: Sequence[Path], tokenizer: Any, paragraphs: bool, console: Any) -> list[Sequence[int]]:
    from forerun.cli.console import note
    from forerun.prompts import encode_prompts
    from forerun.train.prompts import read_prompts

    if not paths:
        return []
    reading = read_prompts(paths, paragraphs=paragraphs)
    if reading.complaint:
        note(console, reading.complaint)
    return list(encode_prompts(tokenizer, reading.prompts, template=False))


def _of_shards(folder: Path | None, vocabulary: int) -> Iterator[Sequence[int]]:
    """The last token of the prompt stays: what the text begins with depends on it."""
    from forerun.train.shards import Shards

    if folder is None:
        return
    shards = Shards(folder)
    if shards.vocab_size < vocabulary:
        raise InvalidArgument(
            f"{folder} was written by {shards.target['name']!r} with {shards.vocab_size} tokens, --model has "
            f"{vocabulary}: name the target that wrote it"
        )
    for sequence in shards:
        yield sequence.tokens[max(sequence.prompt_length - 1, 0) :].tolist()


def _count(sequences: list[Sequence[int]], tokenizer: Any, settings: NgramOptions) -> NgramTable:
    from forerun.drafters import NgramTable
    from forerun.drafters.compatible import vocabulary_digest

    largest = max((max(tokens) for tokens in sequences if len(tokens)), default=0)
    return NgramTable.count(
        sequences,
        vocab_size=max(len(tokenizer), largest + 1),
        tokenizer=vocabulary_digest(tokenizer),
        **asdict(settings),
    )


def _place(output: Path) -> Path:
    """A name without a suffix is a folder's."""
    is_folder = output.is_dir() or not output.suffix
    return output / FILE_NAME if is_folder else output
