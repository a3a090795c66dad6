"""What happened in a run, one JSON object a line, and the curves drawn from it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.files import disk_error, parse_json
from forerun.measure.plot import save
from forerun.train.run_folder import AGAIN

NAME = "train.jsonl"


class TrainLog:
    """`train.jsonl`: rows with the key "loss" are steps, rows with the key "proxy" are measurements."""

    def __init__(self, folder: Path, step: int) -> None:
        """What was written after `step` was lost with the weights it tells of, and goes."""
        self.path = folder / NAME
        kept = [row for row in read_log(folder) if row["step"] <= step] if step else []
        self._put("w", kept)

    def add(self, row: Mapping[str, Any]) -> None:
        self._put("a", [row])

    def _put(self, mode: str, rows: list[Any]) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            raise disk_error(self.path, error, AGAIN) from error


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, without a last one that a kill cut short."""
    path = folder / NAME
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            if number < len(lines):
                raise InvalidArgument(f"{path}, line {number}: {error}; delete that line") from error
    return rows


def draw_curves(folder: Path) -> list[Path]:
    """loss.png and acceptance.png beside the log; none where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    rows = read_log(folder)
    steps = [row for row in rows if "loss" in row]
    looks = [row for row in rows if "proxy" in row]
    drawn = []
    for name, draw in (("loss.png", _draw_loss), ("acceptance.png", _draw_acceptance)):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, steps, looks)
        axes.set_xlabel("step")
        axes.legend(fontsize=8)
        save(figure, folder / name, dpi=130)
        drawn.append(folder / name)
    return drawn


def _draw_loss(axes: Any, steps: list[dict[str, Any]], looks: list[dict[str, Any]]) -> None:
    axes.plot([row["step"] for row in steps], [row["loss"] for row in steps], linewidth=0.8, label="training")
    axes.plot([row["step"] for row in looks], [row["proxy"]["loss"] for row in looks], marker=".", label="held out")
    axes.set_ylabel("loss")


def _draw_acceptance(axes: Any, steps: list[dict[str, Any]], looks: list[dict[str, Any]]) -> None:
    places = max((len(row["proxy"]["acceptance"]) for row in looks), default=0)
    for place in range(places):
        values = [row["proxy"]["acceptance"][place] for row in looks]
        axes.plot([row["step"] for row in looks], values, marker=".", label=f"token {place + 1}, held out")
    axes.plot(
        [row["step"] for row in steps],
        [row["acceptance"][0] for row in steps],
        linewidth=0.6,
        label="token 1, training",
    )
    axes.set_ylabel("expected acceptance at temperature 1")
    axes.set_ylim(0, 1)
