"""`forerun bench seq2seq`: encoder-decoder pairs, decoding with drafts against decoding without."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forerun.cli.bench import FILE, names, sizes
from forerun.cli.measurement import measure, show_with


@click.command()
@click.option(
    "--pairs",
    type=names,
    metavar="NAME,...",
    default="whisper-large,t5-xxl",
    show_default=True,
    help="Sizes with random weights; whisper-mini and t5-mini are for a CPU.",
)
@click.option("--batch-sizes", type=sizes, metavar="N,...", default="1,8", show_default=True)
@click.option("--alpha", type=float, default=0.87, show_default=True, help="Chance that a draft token is kept.")
@click.option("--draft-length", type=click.IntRange(min=1), metavar="N", default=6, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", default=128, show_default=True, help="Of each row.")
@click.option("--repeats", type=click.IntRange(min=1), metavar="N", default=3, show_default=True, help="Seeds.")
@click.option("--no-compile", is_flag=True, help="Record no CUDA graphs.")
@click.option("--device", help="cpu, cuda ... [default: a GPU where there is one]")
@click.option("--output", type=FILE, help="The record [default: benchmarks/results of a checkout, else here].")
@click.option("--plot", "picture", type=FILE, help="Draw milliseconds a token, too.")
def seq2seq(
    pairs: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    alpha: float,
    draft_length: int,
    tokens: int,
    repeats: int,
    no_compile: bool,
    device: str | None,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Time encoder-decoder models behind their encoder: plainly, with drafts, and transformers for comparison.

    The draft has two decoder layers and shares the encoder, as Distil-Whisper's does; its acceptance is dialled in.
    """
    from forerun.bench.seq2seq.run import Settings, carry_out
    from forerun.loading.load import choose_device

    asked = Settings(pairs, batch_sizes, alpha, draft_length, tokens, repeats, not no_compile)
    where, command = choose_device(device), ["forerun", *sys.argv[1:]]
    measure("seq2seq", output, picture, lambda path, bar: carry_out(asked, where, path, bar, command), show_seq2seq)


show_seq2seq = show_with("forerun.bench.seq2seq")
