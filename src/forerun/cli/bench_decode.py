"""`forerun bench decode`: what a token costs plainly and with drafts, by batch and length, beside the hardware."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from forerun.cli.bench import FILE, sizes
from forerun.cli.measurement import measure, show_with


@click.command()
@click.option(
    "--model",
    metavar="MODEL|PAIR",
    help="A synthetic pair, TARGET+DRAFT@ALPHA of 6.7b, 0.33b, wide, narrow, tiny, mini, or a target together with "
    "--draft [default: synthetic:6.7b+0.33b@0.87 on a GPU, synthetic:tiny+mini@0.87 elsewhere].",
)
@click.option(
    "--draft", metavar="MODEL", help="A smaller model with the same tokenizer, for a --model that is no pair."
)
@click.option("--batch-sizes", "batches", type=sizes, metavar="N,...", help="[default: 1,2,4,8,16]")
@click.option(
    "--prompt-length", type=click.IntRange(min=1), metavar="N", help="At most. [default: 448 on a GPU, 32 elsewhere]"
)
@click.option(
    "--max-new-tokens",
    "new_tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of every row; end tokens are ignored. [default: 128 on a GPU, 48 elsewhere]",
)
@click.option(
    "--seconds",
    "most_seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Begin no part later than that; the most important ones come first. [default: 150]",
)
@click.option("--quick", is_flag=True, help="Batches of 1 and 8, short texts, one turn.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True)
@click.option("--device", help="[default: a GPU where there is one]")
@click.option("--dtype", help="[default: bfloat16 on a GPU, float32 elsewhere]")
@click.option("--output", type=FILE, help="The record [default: benchmarks/results of a checkout, else here].")
@click.option("--plot", "picture", type=FILE, help="Draw latency, utilisation, bandwidth and memory, too.")
def decode(output: Path | None, picture: Path | None, model: str | None, draft: str | None, **options: Any) -> None:
    """Time whole rounds: plain decoding, drafts of 4, 6 and 8 tokens, BASS's rule and auto, batch by batch.

    Shows milliseconds a token of the first and the last row to finish and of all, what share of the measured bandwidth
    and FLOPS the rounds use, how much of a round is not the device's, memory beside weights and cache, and transformers
    with the same pair. Nothing is downloaded: a synthetic pair has random weights, full cost and a known acceptance
    rate. Under three minutes on an H200; Ctrl-C keeps what was measured.
    """
    from forerun.bench.decode.plan import make_plan
    from forerun.bench.decode.run import carry_out

    plan, command = make_plan(model, draft, **options), ["forerun", *sys.argv[1:]]
    measure("decode", output, picture, lambda path, bar: carry_out(plan, path, bar, command), show_decode)


show_decode = show_with("forerun.bench.decode")
