"""What the commands of this folder share: where the record goes, and how a measurement is run from a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.measure.progress import Reporter
from forerun.measure.record import Record
from forerun.measure.show import measure

Run = Callable[[Path, Reporter, list[str]], Record]
"""A measurement that saves itself at a path, reports how it goes and keeps the words of its command."""


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=_words(name), description=description)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda ...; a GPU where there is one")


def add_outputs(parser: argparse.ArgumentParser, plot: str) -> None:
    """`plot` says what the picture shows."""
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.add_argument("--plot", type=Path, help=f"draw {plot}, too")


def run_command(name: str, arguments: Sequence[str], chosen: argparse.Namespace, run: Run) -> int:
    """Measure, print and save; the exit status."""
    words = [*_words(name).split(), *arguments]
    return measure(
        name.replace("_", "-"), chosen.output, chosen.plot, lambda path, reporter: run(path, reporter, words)
    )


def _words(name: str) -> str:
    return f"python -m benchmarks.{name}"
