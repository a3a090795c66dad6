"""What happened in a run, one JSON object a line, and the curves drawn from it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import InvalidArgument
from forerun.files import disk_error, parse_json
from forerun.measure.plot import Figure, Panel, Series, draw
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
    rows = read_log(folder)
    steps = [row for row in rows if "loss" in row]
    looks = [row for row in rows if "proxy" in row]
    panels = {"loss.png": _loss_panel(steps, looks), "acceptance.png": _acceptance_panel(steps, looks)}
    for name, panel in panels.items():
        draw(Figure("", (panel,), panel_size=(7.0, 4.0)), folder / name)
    return [folder / name for name in panels]


def _loss_panel(steps: list[dict[str, Any]], looks: list[dict[str, Any]]) -> Panel:
    training = Series("training", _steps(steps), tuple(row["loss"] for row in steps), marker="")
    held_out = Series("held out", _steps(looks), tuple(row["proxy"]["loss"] for row in looks), marker=".")
    return Panel("Loss", "step", "loss", (training, held_out), y_from=None)


def _acceptance_panel(steps: list[dict[str, Any]], looks: list[dict[str, Any]]) -> Panel:
    places = max((len(row["proxy"]["acceptance"]) for row in looks), default=0)
    held_out = [
        Series(
            f"token {place + 1}, held out",
            _steps(looks),
            tuple(row["proxy"]["acceptance"][place] for row in looks),
            marker=".",
        )
        for place in range(places)
    ]
    training = Series("token 1, training", _steps(steps), tuple(row["acceptance"][0] for row in steps), marker="")
    title = "Expected acceptance at temperature 1"
    return Panel(title, "step", "chance that a drafted token is kept", (*held_out, training))


def _steps(rows: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(row["step"] for row in rows)
