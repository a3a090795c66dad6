"""Leviathan's figures 2 and 3 with the measured drafters on top, and each drafter's own curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.math.theory import best_draft_length, expected_tokens
from forerun.measure.plot import check_plot, save
from forerun.plan.record import AcceptanceFacts, DrafterPlan, PlanRecord

LENGTHS = (1, 3, 5, 7, 10)  # of figure 2, as published
COSTS = (0.01, 0.02, 0.05, 0.1)  # of figure 3, as published
LONGEST = 32
COLUMNS = 3
MARKERS = "osD^vP*X"
GREYS = ("#c9c9c9", "#adadad", "#8f8f8f", "#707070", "#505050")


def plot(record: PlanRecord, path: Path) -> None:
    """The theory above, one panel for every drafter, batch size and temperature below."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    columns = min(COLUMNS, max(len(record.plans), 1))
    below = -(-len(record.plans) // columns)
    figure = Figure(figsize=(12.5, 4.6 + 3.6 * below), layout="constrained")
    grid = figure.add_gridspec(1 + below, 6, height_ratios=[1.2, *[1] * below])
    _figure_2(record, figure.add_subplot(grid[0, :3]))
    _figure_3(record, figure.add_subplot(grid[0, 3:]))
    for place, plan in enumerate(record.plans):
        width = 6 // columns
        left = width * (place % columns)
        _own_curve(plan, figure.add_subplot(grid[1 + place // columns, left : left + width]), _colours(record))
    machine = record.provenance.machine
    figure.suptitle(f"{record.settings['target']} on {machine.gpu or machine.cpu}", fontsize=11)
    save(figure, path)


def _colours(record: PlanRecord) -> dict[str, str]:
    palette = ("#c1432e", "#3b75af", "#4a9a4a", "#8c5fa8", "#d08a1d", "#2a9d9d", "#7a5230", "#d06a9c")
    return {name: palette[i % len(palette)] for i, name in enumerate(record.operations)}


def _figure_2(record: PlanRecord, axes: Any) -> None:
    """Tokens a round over alpha; the drafters' own at the lengths that were counted."""
    alphas = [i / 200 for i in range(201)]
    for length, grey in zip(LENGTHS, GREYS, strict=True):
        curve = [expected_tokens(a, length) for a in alphas]
        axes.plot(alphas, curve, color=grey)
        axes.annotate(f"{length}", (1, curve[-1]), (3, -3), textcoords="offset points", fontsize=8, color=grey)
    for marker, facts in zip(MARKERS, record.acceptance, strict=False):
        found = {length: 1 + sum(survival) for length, survival in facts.survival.items()}
        axes.plot([facts.alpha] * len(found), list(found.values()), color=_colours(record)[facts.drafter],
                  marker=marker, markersize=5, linewidth=1, label=_name(facts))  # fmt: skip
        _spread_labels(axes, facts.alpha, found, _colours(record)[facts.drafter])
    axes.set_title("Tokens a round (Leviathan, figure 2): curves by draft length, dots as counted", fontsize=9)
    _finish(axes, "alpha: chance that a drafted token is kept", "tokens a round")


def _spread_labels(axes: Any, x: float, found: dict[int, float], colour: str) -> None:
    """The draft length beside each dot, unless it would lie on the one before."""
    low, high = axes.get_ylim()
    last = float("-inf")
    for length, y in found.items():
        if y - last > (high - low) / 30:
            axes.annotate(f"{length}", (x, y), (6, -3), textcoords="offset points", fontsize=8, color=colour)
            last = y


def _figure_3(record: PlanRecord, axes: Any) -> None:
    """The best draft length over alpha; the drafters' own best."""
    alphas = [i / 200 for i in range(199)]
    for c, grey in zip(COSTS, GREYS[1:], strict=True):
        axes.plot(alphas, [best_draft_length(a, c, LONGEST) for a in alphas], color=grey, label=f"c = {c:g}")
    rates = {(facts.drafter, facts.temperature): facts.alpha for facts in record.acceptance}
    for marker, plan in zip(MARKERS, record.plans, strict=False):
        alpha, colour = rates[(plan.drafter, plan.temperature)], _colours(record)[plan.drafter]
        axes.plot([alpha], [plan.best], marker=marker, color=colour, linestyle="", label=f"{_title(plan)}: predicted")
        if plan.verdict is not None:
            axes.plot([alpha], [plan.verdict.measured_length], marker=marker, color=colour, linestyle="",
                      fillstyle="none", markersize=11)  # fmt: skip
    axes.set_ylim(-0.5, 20)
    axes.set_title("Best draft length (Leviathan, figure 3): curves by c; dots predicted, rings measured", fontsize=9)
    _finish(axes, "alpha: chance that a drafted token is kept", "draft length")


def _own_curve(plan: DrafterPlan, axes: Any, colours: dict[str, str]) -> None:
    lengths = [entry.length for entry in plan.predictions]
    axes.axhline(1, color="black", linewidth=0.8)
    axes.plot(lengths, [entry.formula.factor for entry in plan.predictions], color="#8f8f8f", linestyle="--",
              label="Leviathan, one alpha and c")  # fmt: skip
    axes.plot(lengths, [entry.factor for entry in plan.predictions], color=colours[plan.drafter], label="predicted")
    if plan.checked:
        axes.errorbar([entry.length for entry in plan.checked], [entry.factor for entry in plan.checked],
                      yerr=[2 * entry.error * entry.factor for entry in plan.checked], color="black", fmt="o",
                      markersize=4, capsize=2, linewidth=1, label="measured, 2 standard errors")  # fmt: skip
    axes.set_xticks(lengths)
    axes.axvline(plan.best, color=colours[plan.drafter], linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_title(_title(plan), fontsize=9)
    _finish(axes, "draft length", "times plain decoding")


def _name(facts: AcceptanceFacts) -> str:
    return f"{facts.drafter}, temperature {facts.temperature:g}"


def _title(plan: DrafterPlan) -> str:
    return f"{plan.drafter}, batch {plan.batch}, temperature {plan.temperature:g}"


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, frameon=False, loc="best")
