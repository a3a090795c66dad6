"""`python -m benchmarks.attention`: what attention over ragged rows costs on a GPU, form by form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.attention.cases import BATCHES, HEADS, LENGTHS, QUERIES, all_cases, to_sweep
from benchmarks.attention.run import run
from forerun.measure.show import main, measure
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


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="Time attention over ragged rows on a GPU: PAD, SPLIT, split keys and auto against masked SDPA. "
        "Times are CUDA-graph replays over keys that are not in the last cache; bandwidth counts live keys and values "
        "alone and is held against a copy in the same run.",
    )
    found.add_argument("--batch-sizes", type=size, nargs="+", default=list(BATCHES))
    found.add_argument("--lengths", type=span, nargs="+", default=list(LENGTHS), help="keys of the rows: N or N..M")
    found.add_argument("--tokens", type=size, nargs="+", default=list(QUERIES), help="new tokens of each row")
    found.add_argument("--heads", type=heads, nargs="+", default=list(HEADS), help="query over key heads: 32/8")
    found.add_argument("--repeats", type=size, default=7)
    found.add_argument("--sweep", action="store_true", help="try other block sizes, stages, warps and chunks, too")
    found.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    found.add_argument("--plot", type=Path, help="draw the shares of bandwidth, too")
    return found


def command(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    need_gpu()
    cases = all_cases(chosen.batch_sizes, chosen.tokens, chosen.lengths, chosen.heads)
    swept = to_sweep(cases) if chosen.sweep else []
    words = ["python", "-m", "benchmarks.attention", *arguments]
    return measure(
        "attention", chosen.output, chosen.plot,
        lambda path, reporter: run(cases, swept, chosen.repeats, path, reporter, words),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
