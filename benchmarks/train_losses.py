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

from forerun.measure.plot import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, Panel, Series, draw

HERE = Path(__file__).parent
RECORD = HERE / "results" / "train-losses.json"
STYLES = {
    "tv+kl": ("tv+kl", RED, "-", "o"),
    "topk003": ("smooth L1 + 0.1 kl (topk003)", GREY, "-", "o"),
    "kl": ("kl", BLUE, "-", "o"),
    "reverse_kl": ("reverse_kl", PURPLE, "-", "o"),
    "tv": ("tv", ORANGE, "-", "o"),
    "parallel": ("parallel heads, tv+kl", GREEN, "--", "s"),
    "causal": ("causal, layers 0 and 29, tv+kl", BLACK, "--", "^"),
}


def collect(runs: Path) -> dict[str, Any]:
    """What the runs left in their folders; provenance once, for they share it but for the command."""
    by_loss = {name: _run(runs / name) for name in STYLES}
    first = json.loads((runs / "tv+kl" / "forerun.json").read_text(encoding="utf-8"))["provenance"]
    return {
        "what": "acceptance by place in the draft for five losses and three kinds of draft: same data, steps, size",
        **{name: first[name] for name in ("machine", "versions", "commit", "date", "data")},
        "runs": by_loss,
    }


def _run(folder: Path) -> dict[str, Any]:
    provenance = json.loads((folder / "forerun.json").read_text(encoding="utf-8"))["provenance"]
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [{name: line[name] for name in ("step", "loss", "acceptance")} for line in lines if "loss" in line]
    run = {name: provenance[name] for name in ("command", "steps", "tokens")} | {"held_out": provenance["proxy"]}
    evaluated = folder / "eval.json"
    if evaluated.is_file():
        run["evaluated"] = json.loads(evaluated.read_text(encoding="utf-8"))
    return {**run, "curve": steps}


def figure(runs: dict[str, Any]) -> Figure:
    by_place, by_step = [], []
    for name, (label, colour, dashes, marker) in STYLES.items():
        rates, curve = runs[name]["held_out"]["acceptance"], runs[name]["curve"]
        places = tuple(float(place) for place in range(1, len(rates) + 1))
        by_place.append(Series(label, places, tuple(rates), colour=colour, dashes=dashes, marker=marker))
        steps, first = tuple(at["step"] for at in curve), tuple(at["acceptance"][0] for at in curve)
        by_step.append(Series(label, steps, first, colour=colour, dashes=dashes, marker=""))
    ticks = max((series.x for series in by_place), key=len)
    acceptance = "expected acceptance, T = 1"
    return Figure(
        "Losses and kinds of draft on the same budget",
        (
            Panel("held out, at the end", "place in the draft", acceptance, tuple(by_place), ticks),
            Panel("first place, batch by batch", "steps", acceptance, tuple(by_step)),
        ),
        columns=2,
        panel_size=(5.0, 4.0),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        RECORD.write_text(json.dumps(collect(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    draw(figure(record["runs"]), HERE.parent / "docs" / "train-losses.png")
