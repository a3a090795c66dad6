"""`python -m benchmarks.attention`: what attention over ragged rows costs on a GPU, form by form."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.attention.cases import BATCHES, HEADS, LENGTHS, QUERIES, all_cases, to_sweep
from benchmarks.attention.run import run
from benchmarks.command import add_outputs, make_parser, run_command
from forerun.measure.show import main
from forerun.measure.timing import need_gpu


def span(value: str) -> tuple[int, int]:
    """`512`, or `64..4096`: the shortest and the longest row."""
    first, dots, last = value.partition("..")
    if not (first.isdecimal() and (last if dots else first).isdecimal()):
        raise argparse.ArgumentTypeError(f"{value!r}: give a length such as 512, or a spread such as 64..4096")
    ends = (int(first), int(last or first))
    if not 0 < ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{value!r}: the shortest row comes first, and has at least one key")
    return ends


def heads(value: str) -> tuple[int, int]:
    """`32/8`: query heads over key heads."""
    first, _, last = value.partition("/")
    if not (first.isdecimal() and last.isdecimal() and int(last) and int(first) % int(last) == 0 and int(first)):
        raise argparse.ArgumentTypeError(f"{value!r}: give query heads over key heads, such as 32/8")
    return int(first), int(last)


def size(value: str) -> int:
    if not (value.isdecimal() and int(value)):
        raise argparse.ArgumentTypeError(f"{value!r}: give whole numbers of at least 1")
    return int(value)


def option_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "attention",
        "Time attention over ragged rows on a GPU: PAD, SPLIT, split keys and auto against masked SDPA. "
        "Times are CUDA-graph replays over keys that are not in the last cache; bandwidth counts live keys and values "
        "alone and is held against a copy in the same run.",
    )
    parser.add_argument("--batch-sizes", type=size, nargs="+", default=list(BATCHES))
    parser.add_argument("--lengths", type=span, nargs="+", default=list(LENGTHS), help="keys of the rows: N or N..M")
    parser.add_argument("--tokens", type=size, nargs="+", default=list(QUERIES), help="new tokens of each row")
    parser.add_argument("--heads", type=heads, nargs="+", default=list(HEADS), help="query over key heads: 32/8")
    parser.add_argument("--repeats", type=size, default=7)
    parser.add_argument("--sweep", action="store_true", help="try other block sizes, stages, warps and chunks, too")
    add_outputs(parser, plot="the shares of bandwidth")
    return parser


def command(arguments: list[str]) -> int:
    chosen = option_parser().parse_args(arguments)
    need_gpu()
    cases = all_cases(chosen.batch_sizes, chosen.tokens, chosen.lengths, chosen.heads)
    swept = to_sweep(cases) if chosen.sweep else []
    return run_command("attention", arguments, chosen, partial(run, cases, swept, chosen.repeats))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
