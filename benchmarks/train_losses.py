"""Losses and kinds of draft on the same budget: a record and a picture from the folders of finished runs.

    python benchmarks/train_losses.py RUNS

RUNS holds one folder a run, named after its loss, `parallel` or `causal`, each made by

    forerun train draft TARGET --data DATA --num-layers 2 --draft-vocabulary 12288 --unroll 3 --learning-rate 1.5e-3 \\
        --max-length 640 --steps 300 --hold-out 256 --log-every 10 --kind feature --loss LOSS -o LOSS

with `--kind parallel --heads 4 --loss tv+kl` and `--kind causal --layers 0,29 --loss tv+kl` for the other kinds. A run
that `forerun train eval` has decoded prompts with keeps what it found. Without RUNS the picture is drawn anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RECORD = HERE / "results" / "train-losses.json"
STYLES = {
    "tv+kl": ("tv+kl", "#c0392b", "o-"),
    "topk003": ("smooth L1 + 0.1 kl (topk003)", "#7f8c8d", "o-"),
    "kl": ("kl", "#2f6fb0", "o-"),
    "reverse_kl": ("reverse_kl", "#8e6bb0", "o-"),
    "tv": ("tv", "#e0a030", "o-"),
    "parallel": ("parallel heads, tv+kl", "#4a9a60", "s--"),
    "causal": ("causal, layers 0 and 29, tv+kl", "#333333", "^--"),
}


def collect(runs: Path) -> dict[str, Any]:
    """What the runs left in their folders; provenance once, for they share it but for the command."""
    found = {name: _run(runs / name) for name in STYLES}
    first = json.loads((runs / "tv+kl" / "forerun.json").read_text(encoding="utf-8"))["provenance"]
    return {
        "what": "acceptance by place in the draft for five losses and three kinds of draft: same data, steps, size",
        **{name: first[name] for name in ("machine", "versions", "commit", "date", "data")},
        "runs": found,
    }


def _run(folder: Path) -> dict[str, Any]:
    made = json.loads((folder / "forerun.json").read_text(encoding="utf-8"))["provenance"]
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [{name: line[name] for name in ("step", "loss", "acceptance")} for line in lines if "loss" in line]
    run = {"command": made["command"], "steps": made["steps"], "tokens": made["tokens"], "held_out": made["proxy"]}
    evaluated = folder / "eval.json"
    if evaluated.is_file():
        run["evaluated"] = json.loads(evaluated.read_text(encoding="utf-8"))
    return {**run, "curve": steps}


def draw(runs: dict[str, Any], path: Path) -> None:
    figure, (by_place, by_step) = plt.subplots(1, 2, figsize=(10, 4.2))
    for name, (label, colour, line) in STYLES.items():
        rates = runs[name]["held_out"]["acceptance"]
        by_place.plot(range(1, len(rates) + 1), rates, line, color=colour, label=label)
        curve = runs[name]["curve"]
        by_step.plot([at["step"] for at in curve], [at["acceptance"][0] for at in curve], line[1:], color=colour)
    by_place.set(xticks=range(1, 5), xlabel="place in the draft", ylabel="expected acceptance, T = 1")
    by_place.set_title("held out, at the end", fontsize=10)
    by_step.set(xlabel="steps")
    by_step.set_title("first place, batch by batch", fontsize=10)
    for axes in (by_place, by_step):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(0, 0.42)
    figure.legend(*by_place.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        RECORD.write_text(json.dumps(collect(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(RECORD.read_text(encoding="utf-8"))["runs"], HERE.parent / "docs" / "train-losses.png")
