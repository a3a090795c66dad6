"""Draws docs/train-losses.png from benchmarks/results/train-losses.json: python benchmarks/plot_train_losses.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STEP = 160  # the last one all runs reached
STYLES = {
    "tv+kl": ("tv+kl", "#c0392b", "o-"),
    "kl": ("kl", "#2f6fb0", "o-"),
    "topk003": ("smooth L1 + 0.1 kl (topk003)", "#7f8c8d", "o-"),
    "tv": ("tv", "#e0a030", "o-"),
    "reverse_kl": ("reverse_kl", "#8e6bb0", "o-"),
    "parallel": ("parallel heads, tv+kl", "#4a9a60", "s--"),
}


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, (by_place, by_step) = plt.subplots(1, 2, figsize=(10, 3.6))
    for name, (label, colour, line) in STYLES.items():
        rates = next(row["acceptance"] for row in runs[name] if row["step"] == STEP)
        by_place.plot(range(1, 5), rates, line, color=colour, label=label)
        if name != "parallel":
            by_step.plot([r["step"] for r in runs[name]], [r["acceptance"][0] for r in runs[name]], color=colour)
    by_place.set(xticks=range(1, 5), xlabel="place in the draft", ylabel="expected acceptance, T = 1")
    by_place.set_title(f"after {STEP} steps", fontsize=10)
    by_place.legend(fontsize=8, frameon=False, loc="lower left")
    by_step.set(xlabel="steps")
    by_step.set_title("first place, batch by batch", fontsize=10)
    for axes in (by_place, by_step):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(0, 0.32)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    record = json.loads((HERE / "results" / "train-losses.json").read_text(encoding="utf-8"))
    draw(record["runs"], HERE.parent / "docs" / "train-losses.png")
