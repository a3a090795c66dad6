"""`forerun train`: the group of commands that make drafters."""

from __future__ import annotations

import click

from forerun.cli.main import LazyCommand, LazyGroup

COMMANDS = {
    "data": LazyCommand("forerun.cli.train_data:data", "Let the target write the text a drafter learns from."),
    "draft": LazyCommand("forerun.cli.train_draft:draft", "Train a drafter for a target."),
    "eval": LazyCommand("forerun.cli.train_eval:evaluate", "Decode held-out prompts with a trained drafter."),
    "compare": LazyCommand("forerun.cli.train_eval:compare", "Put several trained drafters side by side."),
    "ngram": LazyCommand("forerun.cli.train_ngram:ngram", "Count an n-gram table from text."),
}


class TrainGroup(LazyGroup):
    """Its commands are imported when they are called, as those of `forerun` itself."""

    table = COMMANDS
    title = "forerun train"
    several = ("draft",)


@click.group(cls=TrainGroup)
def train() -> None:
    """Make a drafter for a target of your own."""
