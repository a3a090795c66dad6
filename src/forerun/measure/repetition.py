"""How much a text repeats itself: a model that goes in circles is easy to draft for, so this stands beside speeds."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 4  # tokens of a run that counts as repeated


def repeated_grams(tokens: Sequence[int]) -> tuple[int, int]:
    """How many runs of `GRAM` tokens the text already had before, and how many there are."""
    grams = list(zip(*(tokens[i:] for i in range(GRAM)), strict=False))
    return len(grams) - len(set(grams)), len(grams)


def repeated_share(rows: Sequence[Sequence[int]]) -> float:
    """Share of the runs of all rows that the same row already had."""
    counts = [repeated_grams(row) for row in rows]
    total = sum(grams for _, grams in counts)
    return sum(repeated for repeated, _ in counts) / total if total else 0.0
