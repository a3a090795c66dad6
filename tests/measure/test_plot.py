"""Pictures from data: every kind of mark, what cannot be drawn, and no picture without matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from forerun.errors import ForerunError, InvalidArgument
from forerun.measure.plot import KINDS, Figure, Panel, Series, check_plot, draw

X, Y = (1.0, 2.0, 4.0), (3.0, 2.0, 1.0)


def figure(**more: object) -> Figure:
    series = tuple(Series(f"as {kind}", X, Y, kind, error=(0.1,) * 3 * (kind in ("line", "bars"))) for kind in KINDS)
    panel = Panel("every kind of mark", "draft length", "speed", series, x_ticks=X, x_scale="log", y_format="{x:.0f}%")
    return Figure("a title", (panel, panel), columns=2)


def test_every_mark_is_in_the_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(figure(), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    for words in ("a title", "draft length", *(f"as {kind}" for kind in KINDS)):
        assert f"<!-- {words} -->" in text


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ForerunError, match="forerun\\[plot\\]"):
        draw(figure(), tmp_path / "p.png")


@pytest.mark.parametrize("name", ["p.txt", "p"])
def test_a_picture_needs_a_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot draw"):
        check_plot(tmp_path / name)
