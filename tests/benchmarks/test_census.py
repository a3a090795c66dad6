"""docs/models.md and the list of proven classes are what `python -m benchmarks.census --write` makes of the census."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import transformers

from benchmarks import census
from forerun.models import families, proven
from support.census import NOT_BUILT, Recipe, causal_recipes, seq2seq_recipes
from support.census_judge import Finding, Outcome, proven_classes
from support.pinned import needs_pinned_transformers

pytestmark = needs_pinned_transformers

ROW = re.compile(r"^\| (.+?) \| (.+?) \|(?: (.+?) \|)?$")


def findings(page: str, title: str, recipes: Sequence[Recipe]) -> list[Finding]:
    """Those that a part of the page tells of, in the order of the recipes."""
    part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    told = dict(_rows(part))
    assert len(told) == len(re.findall(r"^\| (?!type )", part, re.MULTILINE)), "a type is listed twice"
    assert set(told) == {recipe.name for recipe in recipes}, "run python -m benchmarks.census --write"
    return [_finding(recipe, *told[recipe.name]) for recipe in recipes]


def _rows(part: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    for line in part.splitlines():
        if (found := ROW.match(line)) and found[1] != "type":
            yield found[1], (found[2], found[3])


def _finding(recipe: Recipe, first: str, trees: str | None) -> Finding:
    if trees is None:
        return Finding(recipe, Outcome.REFUSED, first)
    return Finding(recipe, Outcome.EXACT, "", first, trees == "yes")


def test_the_page_is_what_the_command_writes() -> None:
    """Of every type with a recipe and of every one without; its numbers are counted from its own lines."""
    page = census.PAGE.read_text()
    causal = findings(page, "Causal models", causal_recipes())
    seq2seq = findings(page, "Encoder-decoder models", seq2seq_recipes())
    assert census.page(causal, seq2seq) == page
    assert proven_classes((*causal, *seq2seq)) == proven.CLASSES, "run python -m benchmarks.census --write"
    assert len(causal) > 150 and len(seq2seq) > 40 and len(NOT_BUILT) > 10


def test_reasons_are_those_that_the_code_gives() -> None:
    page = census.PAGE.read_text()
    for kind, reason in (*families.REASONS.items(), *families.SEQ2SEQ_REASONS.items()):
        assert kind in NOT_BUILT or f"{reason}; use model.generate for it |" in page, kind


def test_the_list_is_what_the_command_writes() -> None:
    assert transformers.__version__ == proven.TRANSFORMERS
    assert census.proven(sorted(proven.CLASSES)) == Path(proven.__file__).read_text()


def test_control_a_type_that_is_missing_is_named() -> None:
    page = re.sub(r"\| llama \|.*\n", "", census.PAGE.read_text())
    with pytest.raises(AssertionError, match="census --write"):
        findings(page, "Causal models", causal_recipes())
