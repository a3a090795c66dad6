"""Leviathan et al., Table 1 and Figures 2 and 3: what the formulas promise. Nothing is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.papers.common import Setup, markdown, record_path, store, times
from forerun.math.theory import best_draft_length, expected_tokens, operations_factor, walltime_factor
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.record import Record

TITLE = "Expected tokens and the best draft length (Leviathan et al., Table 1, Figures 2 and 3)"
ALPHAS = tuple(i / 50 for i in range(50))
GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)
LONGEST = 128
MOST_SHOWN = 30  # of the best draft lengths in the picture
PRINTED = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
"""Rows of Table 1: alpha and gamma, with drafts that cost nothing."""


def measure(setup: Setup, path: Path | None = None, pair: object = None) -> Record:
    results = {
        "table1": [_row(alpha, gamma) for alpha, gamma in PRINTED],
        "figure2": {str(gamma): [round(expected_tokens(alpha, gamma), 6) for alpha in ALPHAS] for gamma in GAMMAS},
        "figure3": {str(c): [best_draft_length(alpha, c, LONGEST) for alpha in ALPHAS] for c in COSTS},
        "alphas": list(ALPHAS),
    }
    return store("theory", setup, "cpu", {"longest": LONGEST}, results, path or record_path("theory"), timed=False)


def _row(alpha: float, gamma: int) -> dict[str, Any]:
    return {
        "alpha": alpha,
        "gamma": gamma,
        "operations": operations_factor(alpha, gamma, 0.0),
        "speed": walltime_factor(alpha, gamma, 0.0),
    }


def figure(record: Record) -> Figure:
    alphas = tuple(record.details["alphas"])
    tokens = [
        Series(f"draft length {gamma}", alphas, tuple(curve), marker="")
        for gamma, curve in record.details["figure2"].items()
    ]
    lengths = [
        Series(
            f"c = {cost}", alphas, tuple(length if length <= MOST_SHOWN else math.nan for length in curve), marker=""
        )
        for cost, curve in record.details["figure3"].items()
    ]
    return Figure(
        "Leviathan's formulas",
        (
            Panel("figure 2", "alpha", "expected tokens a round", tuple(tokens), y_from=1.0),
            Panel("figure 3", "alpha", "best draft length", tuple(lengths), y_whole=True),
        ),
        columns=2,
        panel_size=(4.8, 3.6),
    )


def render(record: Record) -> list[str]:
    rows = record.details["table1"]
    return [
        *markdown(
            ("alpha", "draft length", "operations", "speed"),
            [(f"{r['alpha']:.1f}", str(r["gamma"]), times(r["operations"]), times(r["speed"])) for r in rows],
        ),
        "",
        "**Held.** All six rows of the paper's Table 1 come out as printed. What the formulas leave out, drafts whose "
        "later tokens are worse and scoring that is not free, is what the measured tables show.",
    ]
