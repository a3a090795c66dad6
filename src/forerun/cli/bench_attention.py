"""`forerun bench attention`: what attention over ragged rows costs on a GPU, form by form, against masked SDPA."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forerun.cli.bench import FILE, names, sizes
from forerun.cli.measurement import measure, show_with


def spans(value: str) -> tuple[tuple[int, int], ...]:
    """`512,64..4096`: the shortest and the longest row."""
    found = []
    for part in names(value):
        first, dots, last = part.partition("..")
        if not (first.isdecimal() and (last if dots else first).isdecimal()):
            raise click.BadParameter(f"{part!r}: give lengths such as 512, or spreads such as 64..4096")
        ends = (int(first), int(last or first))
        if not 0 < ends[0] <= ends[1]:
            raise click.BadParameter(f"{part!r}: the shortest row comes first, and has at least one key")
        found.append(ends)
    return tuple(found)


def head_kinds(value: str) -> tuple[tuple[int, int], ...]:
    """`32/32,32/8`: query heads over key heads."""
    found = []
    for part in names(value):
        first, _, last = part.partition("/")
        if not (first.isdecimal() and last.isdecimal() and int(last) and int(first) % int(last) == 0 and int(first)):
            raise click.BadParameter(f"{part!r}: give query heads over key heads, such as 32/8")
        found.append((int(first), int(last)))
    return tuple(found)


@click.command()
@click.option("--batch-sizes", type=sizes, metavar="N,...", default="1,8,16", show_default=True)
@click.option(
    "--lengths",
    type=spans,
    metavar="N|N..M,...",
    default="512,4096,64..4096",
    show_default=True,
    help="Keys of the rows: all the same, or evenly spread.",
)
@click.option(
    "--tokens", type=sizes, metavar="N,...", default="1,5,8", show_default=True, help="New tokens of each row."
)
@click.option("--heads", type=head_kinds, metavar="Q/K,...", default="32/32,32/8", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), metavar="N", default=7, show_default=True)
@click.option(
    "--sweep", is_flag=True, help="Also try other block sizes, stages, warps and chunks where rows differ most."
)
@click.option("--output", type=FILE, help="The record [default: benchmarks/results of a checkout, else here].")
@click.option("--plot", "picture", type=FILE, help="Draw the shares of bandwidth, too.")
def attention(
    batch_sizes: tuple[int, ...],
    lengths: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    repeats: int,
    sweep: bool,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Time attention over ragged rows on a GPU: PAD, SPLIT, split keys and auto against masked SDPA.

    Times are CUDA-graph replays over keys that are not in the last cache. Bandwidth counts live keys and values alone
    and is held against a copy measured in the same run. About half a minute on an H200, compilation included.
    """
    from forerun.bench.attention.cases import all_cases, to_sweep
    from forerun.bench.attention.run import carry_out
    from forerun.bench.attention.timing import need_gpu

    need_gpu()
    cases = all_cases(batch_sizes, tokens, lengths, heads)
    swept, command = to_sweep(cases) if sweep else [], ["forerun", *sys.argv[1:]]
    measure(
        "attention",
        output,
        picture,
        lambda path, bar: carry_out(cases, swept, repeats, path, bar, command),
        show_attention,
    )


show_attention = show_with("forerun.bench.attention")
