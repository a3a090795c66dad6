"""Leviathan's figures 2 and 3 with the measured drafters on top, and each drafter's own curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from forerun.math.theory import best_draft_length, expected_tokens
from forerun.measure.plot import BLACK, COLOURS, GREY, Figure, Panel, Series
from forerun.plan.acceptance import CountedAcceptance
from forerun.plan.results import DrafterPlan, PlanResults

T = TypeVar("T")
LENGTHS = (1, 3, 5, 7, 10)  # of figure 2, as published
COSTS = (0.01, 0.02, 0.05, 0.1)  # of figure 3, as published
LONGEST = 20
MARKERS = "osD^vP*X"
GREYS = ("#c9c9c9", "#adadad", "#8f8f8f", "#707070", "#505050")
ALPHAS = tuple(i / 100 for i in range(100))


def figure(title: str, results: PlanResults) -> Figure | None:
    """The theory above, one panel for every drafter, batch size and temperature below; None while nothing is known."""
    if not results.plans:
        return None
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(results.operations)}
    curves = [_drafter_curve(plan, colours[plan.drafter]) for plan in results.plans]
    return Figure(title, (_figure_2(results, colours), _figure_3(results, colours), *curves), columns=2)


def _figure_2(results: PlanResults, colours: Mapping[str, str]) -> Panel:
    """Tokens a round over alpha; the drafters' own at the lengths that were counted."""
    theory = [
        Series(
            f"formula, draft length {n}",
            ALPHAS,
            tuple(round(expected_tokens(a, n), 3) for a in ALPHAS),
            colour=grey,
            marker="",
        )
        for n, grey in zip(LENGTHS, GREYS, strict=True)
    ]
    counted = [_counted(entry, colours[entry.drafter], mark) for mark, entry in _marked(results.acceptance)]
    title = "Tokens a round (Leviathan, figure 2); numbers are draft lengths"
    return Panel(title, "alpha: chance that a drafted token is kept", "tokens a round", (*theory, *counted))


def _counted(acceptance: CountedAcceptance, colour: str, marker: str) -> Series:
    tokens = {length: 1 + sum(trace.survival()) for length, trace in acceptance.traces.items()}
    return Series(
        f"{acceptance.drafter}, temperature {acceptance.temperature:g}: counted",
        (acceptance.alpha,) * len(tokens),
        tuple(tokens.values()),
        colour=colour,
        marker=marker,
        names=_spread_labels(tokens),
    )


def _spread_labels(tokens: Mapping[int, float]) -> tuple[str, ...]:
    """The draft length beside each mark, unless it would lie on the one before."""
    least = expected_tokens(ALPHAS[-1], LENGTHS[-1]) / 30  # of the whole axis
    labels, last = [], float("-inf")
    for length, y in tokens.items():
        shown = y - last > least
        labels.append(str(length) if shown else "")
        last = y if shown else last
    return tuple(labels)


def _figure_3(results: PlanResults, colours: Mapping[str, str]) -> Panel:
    """The best draft length over alpha; the drafters' own best."""
    series = [
        Series(
            f"formula, c = {c:g}",
            ALPHAS,
            tuple(best_draft_length(a, c, LONGEST) for a in ALPHAS),
            colour=grey,
            marker="",
        )
        for c, grey in zip(COSTS, GREYS[1:], strict=True)
    ]
    alphas = {(entry.drafter, entry.temperature): entry.alpha for entry in results.acceptance}
    for marker, plan in _marked(results.plans):
        x, colour = (alphas[plan.drafter, plan.temperature],), colours[plan.drafter]
        series.append(Series(f"{_title(plan)}: predicted best", x, (plan.best,), "points", colour, marker=marker))
        if plan.verdict is not None:
            fastest = (plan.verdict.measured_length,)
            series.append(Series(f"{_title(plan)}: measured best", x, fastest, "rings", colour, marker=marker))
    title = "Best draft length (Leviathan, figure 3)"
    return Panel(title, "alpha: chance that a drafted token is kept", "draft length", tuple(series), y_whole=True)


def _drafter_curve(plan: DrafterPlan, colour: str) -> Panel:
    lengths = tuple(float(entry.length) for entry in plan.predictions)
    formula = tuple(entry.formula.factor for entry in plan.predictions)
    series = [
        Series("plain decoding", (), (1.0,), "level", BLACK),
        Series("Leviathan, one alpha and c", lengths, formula, colour=GREY, dashes="--", marker=""),
        Series("predicted", lengths, tuple(entry.factor for entry in plan.predictions), colour=colour, marker=""),
        Series("predicted best length", (float(plan.best),), (), "place", colour, dashes=":"),
    ]
    if plan.checked:
        series.append(
            Series(
                "measured, 2 standard errors",
                tuple(float(entry.length) for entry in plan.checked),
                tuple(entry.factor for entry in plan.checked),
                "points",
                BLACK,
                error=tuple(2 * entry.error * entry.factor for entry in plan.checked),
            )
        )
    return Panel(_title(plan), "draft length", "times plain decoding", tuple(series), x_ticks=lengths)


def _marked(items: list[T]) -> list[tuple[str, T]]:
    """Each with a marker of its own, as far as there are markers."""
    return [(MARKERS[i % len(MARKERS)], item) for i, item in enumerate(items)]


def _title(plan: DrafterPlan) -> str:
    return f"{plan.drafter}, batch {plan.batch}, temperature {plan.temperature:g}"
