"""docs/papers.md from the records, and its pictures: nothing on the page is written by hand that a record could say.

A record that is missing is refused, unless a partial page is asked for: then its place says how to fill it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers import others
from benchmarks.papers.common import (
    PICTURES,
    RESULTS,
    ROOT,
    picture_path,
    place_of,
    read,
    record_path,
)
from benchmarks.papers.pairs import EMBEDDED, SYNTHETIC
from benchmarks.papers.tables import TABLES
from forerun.errors import InvalidArgument
from forerun.measure.plot import draw
from forerun.measure.record import Record

PAGE = ROOT / "docs" / "papers.md"
INTRO = """# The papers, made again

Five papers make claims about speculative decoding. Each table or figure below is one command on your own models; the
record says on which machine, with which versions and with which command it was made, and a few sentences say what held,
what did not, and why. This page is written from the records by `python -m benchmarks.papers page`.

```
python -m benchmarks.papers --help      # all tables, and how long each takes
python -m benchmarks.papers chen        # one table: its record and picture, in new files
python -m benchmarks.papers chen --target MODEL --draft MODEL        # the same with models of your own
python -m benchmarks.papers chen --update      # the record and picture that this page shows
python -m benchmarks.papers bass --pair synthetic --device cuda      # the same with large models of random weights
python -m benchmarks.papers page        # this page, from all records
FORERUN_DATA=FOLDER python -m ...       # with XSum, HumanEval, WikiText-2 and Spec-Bench from a folder
```

Numbers are of the machines named: compare ratios, not milliseconds. Time is counted after the prompt has been read.
K, gamma and draft length are the same thing. Acceptance is meant as each paper means it: accepted / drafted; accepted /
(K + 1) for Chen et al.; for Leviathan et al. alpha, the chance that a draft token is kept where it was reached."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one record goes on the page."""

    title: str
    command: str  # that makes it
    record: Path
    picture: Path
    render: Callable[[Path], Sequence[str]]
    draw: Callable[[Path, Path], None] | None = None  # None: its command has drawn it
    is_extra: bool = False  # a second pair of models: shown where it was measured, not missed where it was not


def measured(table: str, pair: str | None, where: str = "") -> Place:
    """A table of this folder."""
    paper_table = TABLES[table]
    options = "" if pair in (None, EMBEDDED) else f" --pair {pair} --device cuda"
    return Place(
        f"{paper_table.title}{where}",
        f"python -m benchmarks.papers {table}{options} --update",
        record_path(table, pair),
        picture_path(table, pair),
        lambda path: _with_origin(read(path), paper_table.render),
        lambda path, picture: draw(paper_table.figure(read(path)), picture),
        is_extra=pair == SYNTHETIC,
    )


def other(
    title: str,
    command: str,
    name: str,
    render: Callable[[Path], Sequence[str]] = others.tables_of,
    draw: Callable[[Path, Path], None] | None = None,
) -> Place:
    """A table that another command measures."""
    return Place(title, command, RESULTS / f"{name}.json", PICTURES / f"{name}.png", render, draw)


def places() -> dict[str, list[Place]]:
    """The page, paper by paper."""
    gpu = ", large models on a GPU"
    papers = {
        "Wagner et al., Optimized Speculative Sampling for GPU Hardware Accelerators": [
            measured("verify", EMBEDDED),
            measured("verify", SYNTHETIC, ", on a GPU"),
            other("Verification kernels against transformers (Tables 1 and 3, Figures 3 and 4)",
                  "python -m benchmarks.kernels --output benchmarks/results/papers/kernels.json", "kernels",
                  others.kernel_lines, others.draw_kernels),
            measured("sigmoid", EMBEDDED),
        ],
        "Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling": [
            measured("chen", EMBEDDED),
            measured("chen", SYNTHETIC, gpu),
        ],
        "Leviathan et al., Fast Inference from Transformers via Speculative Decoding": [
            measured("theory", None),
            measured("leviathan", EMBEDDED),
        ],
        "TopK-ImpSpecDec": [
            measured("topk", EMBEDDED),
            other("Trees against chains of as many scored positions",
                  "python -m benchmarks.papers.trees --output benchmarks/results/papers/trees.json", "trees",
                  others.tree_lines),
        ],
        "Qian et al., BASS: Batched Attention-optimized Speculative Sampling": [
            measured("bass", EMBEDDED),
            measured("bass", SYNTHETIC, gpu),
            measured("int8", EMBEDDED),
            measured("service", EMBEDDED),
        ],
    }  # fmt: skip
    return {
        paper: [place for place in tables if place.record.exists() or not place.is_extra]
        for paper, tables in papers.items()
    }


def make(*, partial: bool = False, page: Path = PAGE) -> None:
    """Write the page, and draw the pictures whose records are here."""
    chosen = places()
    page_text(chosen, partial=partial, page=page)  # complains of missing records before anything is drawn
    if importlib.util.find_spec("matplotlib") is not None:
        draw_all(chosen)
    page.write_text(page_text(chosen, partial=partial, page=page), encoding="utf-8")
    missing = missing_of(chosen)
    print(f"{page}: {sum(map(len, chosen.values())) - len(missing)} tables, {len(missing)} still to be measured")


def page_text(chosen: Mapping[str, Sequence[Place]], *, partial: bool = False, page: Path = PAGE) -> str:
    missing = missing_of(chosen)
    if missing and not partial:
        listed = "\n".join(f"  {place.record.name}: {place.command}" for place in missing)
        raise InvalidArgument(
            f"{len(missing)} records are missing; make them, or ask for a page with gaps by --partial:\n{listed}"
        )
    parts = [INTRO.splitlines()]
    for paper, tables in chosen.items():
        parts.append(["", f"## {paper}"])
        parts += [section(place, page) for place in tables]
    return "\n".join(line for part in parts for line in part) + "\n"


def section(place: Place, page: Path = PAGE) -> list[str]:
    heading = ["", f"### {place.title}", "", f"`{place.command}`", ""]
    if not place.record.is_file():
        return [*heading, "Not measured yet."]
    picture = [f"![{place.title}]({place.picture.relative_to(page.parent).as_posix()})", ""]
    return [*heading, *(picture if place.picture.is_file() else []), *place.render(place.record)]


def missing_of(chosen: Mapping[str, Sequence[Place]]) -> list[Place]:
    return [place for tables in chosen.values() for place in tables if not place.record.is_file()]


def draw_all(chosen: Mapping[str, Sequence[Place]]) -> None:
    for tables in chosen.values():
        for place in tables:
            if place.draw is not None and place.record.is_file():
                place.draw(place.record, place.picture)


def _with_origin(record: Record, render: Callable[[Record], Sequence[str]]) -> list[str]:
    return [*render(record), "", *origin(record)]


def origin(record: Record) -> list[str]:
    """What one must know before quoting a figure."""
    source = record.provenance
    libraries = ", ".join(
        f"{name} {source.versions[name]}" for name in ("torch", "transformers") if name in source.versions
    )
    lines = [f"<sub>{place_of(record)}; {libraries}; commit {source.commit or 'unknown'}; {source.date[:10]}.</sub>"]
    if record.settings.get("quick"):
        lines += ["", "*A quick run that shows that the command works: its figures say nothing yet.*"]
    return lines + [line for note in record.remarks for line in ("", f"*Note: {note}.*")]
