"""Trees against chains that score as many positions: tokens per target call.

    python benchmarks/papers/trees.py --prompts 4 --output benchmarks/results/trees.json

Tokens per call follow from counting and do not depend on how fast the machine is. The drafter is the trained one that
comes with Forerun for the target (give --draft for another); prompts are Spec-Bench's where they are found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from forerun import SpeculativeDecoder, Stats, Tree, drafts
from forerun.bench.prompts import encode, find_questions
from forerun.drafters import from_folder
from forerun.drafters.base import Drafter
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import check_output
from forerun.loading import load_model
from forerun.measure.progress import Bar
from forerun.measure.provenance import provenance
from forerun.measure.record import Record, default_path

LONGEST_PROMPT = 512  # tokens; longer ones only take time here
BOTH = ("top", "sampled")


@dataclass(frozen=True)
class Line:
    """One shape of drafts at one temperature."""

    temperature: float
    size: int  # tokens drafted a round: a chain's length, a tree's nodes
    shape: str  # chain, top or sampled
    tokens: int
    rounds: int
    drafted: float  # tokens a round, on average; a budget or a short draft may leave fewer
    tokens_per_call: float
    gain: float  # over the chain of the same size at the same temperature


def decode(target: Any, tokenizer: Any, drafter: Drafter, depth: int, prompts: list[Any], **how: Any) -> Stats:
    """Counts over all prompts, a batch at a time."""
    decoder = SpeculativeDecoder(target, drafter, policy=depth, tokenizer=tokenizer)
    batch, done = how.pop("batch"), how.pop("done")
    parts = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=target.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=target.device)
        parts.append(decoder.generate(ids, mask, **how).stats)
        done(len(rows))
    return Stats.total(parts)


def compare(
    run: Callable[[Drafter, int, float], Stats],
    fresh: Callable[[], Drafter],
    sizes: Sequence[int],
    width: int,
    depth: int,
    temperatures: Sequence[float],
) -> list[Line]:
    """Every size and temperature: the chain, then trees of as many tokens."""
    lines = []
    for temperature in temperatures:
        for size in sizes:
            chain = run(fresh(), size, temperature)
            lines.append(_line(temperature, size, "chain", chain, chain))
            for siblings in BOTH if temperature else BOTH[:1]:
                tree = Tree(fresh(), nodes=size, width=width, siblings=siblings)
                lines.append(_line(temperature, size, siblings, run(tree, min(depth, size), temperature), chain))
    return lines


def _line(temperature: float, size: int, shape: str, stats: Stats, chain: Stats) -> Line:
    drafted = stats.num_draft_tokens / max(stats.num_drafts, 1)
    gain = stats.tokens_per_round / chain.tokens_per_round - 1
    counts = (stats.num_emitted_tokens, stats.rounds, drafted)
    return Line(temperature, size, shape, *counts, stats.tokens_per_round, gain)


def table(lines: Sequence[Line]) -> str:
    rows = ["| T | tokens drafted | chain | tree, top | tree, sampled |", "|---|---|---|---|---|"]
    for temperature, size in dict.fromkeys((line.temperature, line.size) for line in lines):
        cells = {line.shape: line for line in lines if (line.temperature, line.size) == (temperature, size)}
        texts = [f"{cells['chain'].tokens_per_call:.2f}"]
        for siblings in BOTH:
            texts.append(
                f"{cells[siblings].tokens_per_call:.2f} ({cells[siblings].gain:+.0%})"
                if siblings in cells
                else "as top"
            )
        rows.append(f"| {temperature:g} | {size} | {' | '.join(texts)} |")
    return "\n".join(rows)


def numbers(kind: type) -> Callable[[click.Context, click.Parameter, str], tuple[Any, ...]]:
    def read(ctx: click.Context, param: click.Parameter, text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r}: give numbers with commas") from None

    return read


@click.command(context_settings={"show_default": True})
@click.option("--model", default="embedded", help="The target: a Hub name, a folder, or 'embedded'.")
@click.option("--draft", type=click.Path(exists=True, path_type=Path), help="A drafter's folder; else the shipped one.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="Spec-Bench's question.jsonl or its folder.")
@click.option("--prompts", type=click.IntRange(min=1), default=4, help="Of each category.")
@click.option("--skip", type=click.IntRange(min=0), default=2, help="Leave out the first: trees were tuned on them.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=96, help="Of each answer.")
@click.option("--sizes", default="4,8,16", callback=numbers(int), help="Tokens drafted a round.")
@click.option("--width", type=click.IntRange(min=1), default=3, help="Alternatives a node.")
@click.option("--depth", type=click.IntRange(min=1), default=6, help="The deepest a tree may be.")
@click.option("--temperatures", default="0,1", callback=numbers(float), help="Each is measured by itself.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Prompts at once.")
@click.option("--seed", default=0, help="Of the sampled texts.")
@click.option("--device", help="cpu, cuda ...; a GPU where there is one.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The JSON record.")
def main(model: str, draft: Path | None, data: Path | None, output: Path | None, **given: Any) -> None:
    """Tokens per target call of trees and of chains that score as many positions."""
    path = output or default_path("trees")
    check_output(path)
    target, tokenizer = load_model(model, device=given["device"])
    folder = draft or drafts.for_target(target)
    if folder is None:
        raise InvalidArgument(f"no drafter comes with Forerun for {model!r}; give one with --draft")
    questions = find_questions(data)
    first, last = given["skip"], given["skip"] + given["prompts"]
    asked = [q for category in questions.categories for q in questions.of(category)[first:last]]
    prompts = [p for p in encode(tokenizer, asked) if len(p) <= LONGEST_PROMPT]
    sizes, temperatures = given["sizes"], given["temperatures"]
    runs = sum(len(sizes) * (3 if temperature else 2) for temperature in temperatures)
    with Bar(Console(stderr=True)) as bar:
        bar.start("decoding", total=runs * len(prompts))

        def run(drafter: Drafter, depth: int, temperature: float) -> Stats:
            sampling = {"temperature": temperature, "seed": given["seed"], "max_new_tokens": given["max_new_tokens"]}
            how = {"batch": given["batch"], "done": bar.advance, **sampling}
            return decode(target, tokenizer, drafter, depth, prompts, **how)

        lines = compare(run, lambda: from_folder(folder), sizes, given["width"], given["depth"], temperatures)
    settings = {"model": model, "draft": folder.name, "source": questions.source, "num_prompts": len(prompts), **given}
    origin = provenance(target.device, ["python", *sys.argv])
    Record("trees", origin, settings, rows=[asdict(line) for line in lines]).save(path)
    click.echo(table(lines))
    click.echo(f"written to {path.name}", err=True)


if __name__ == "__main__":
    try:
        main()
    except ForerunError as error:
        raise SystemExit(f"error: {error}") from None
