"""One way to draw: pictures are data (series in panels) that a record stores and this module draws.

A stored record can therefore be drawn without the code that measured it. matplotlib is imported only while drawing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.arguments import refuse
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import check_output, write_whole

SUFFIXES = (".png", ".svg", ".pdf")
RED, BLUE, ORANGE, GREEN, PURPLE = "#c1432e", "#3b75af", "#e8a33d", "#5a9367", "#7b5ea7"
GREY, BLACK, PALE_BLUE, PALE_GREY = "#8a8a8a", "#333333", "#9ec3e6", "#dddddd"
COLOURS = (RED, BLUE, ORANGE, GREEN, PURPLE, PALE_BLUE, GREY, BLACK)
"""In the order they are taken where nobody chooses; red is for what is proposed, greys for what it is held against."""
KINDS = ("line", "points", "rings", "bars", "below", "level", "place")
SCALES = ("linear", "log", "log10")
LETTERS_AN_INCH = 12
"""Names at the ticks that would run into each other are turned."""
LARGEST_PANEL = 50
"""Inches; pixels are held in memory while drawing."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values with a name that the legend shows.

    `kind`: "line"; "points" or "rings" without a line; "bars" side by side at each place; "below" shades what lies
    below the values; "level" and "place" are one horizontal or vertical line over the whole panel, at y[0] or x[0].
    """

    label: str  # "" keeps it out of the legend
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: str = "line"
    colour: str | None = None  # None: the next of `COLOURS`
    dashes: str = "-"  # -, --, :, -.
    marker: str = "o"
    error: tuple[float, ...] = ()  # half the interval of each value, where there are repeats
    values: str = ""  # a format such as "%.2f" writes the values beside the marks
    names: tuple[str, ...] = ()  # text beside each mark, "" for none


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[float, ...] = ()  # draft lengths and batch sizes: exactly these
    x_names: tuple[str, ...] = ()  # what to write at the ticks, where not the number
    x_scale: str = "linear"  # or "log" (base 2), "log10"
    y_scale: str = "linear"
    y_format: str = ""  # such as "{x:.0f}%"
    y_whole: bool = False  # ticks at whole numbers only: there is no draft of 2.5 tokens
    y_from: float | None = 0.0  # where the axis begins; None: at the data


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels in rows under a title."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 1
    panel_size: tuple[float, float] = (6.0, 4.0)  # inches


def check_figure(figure: Figure, name: str) -> None:
    """Raise where parts of a stored figure do not fit each other; `name` is its place in the file."""
    if not all(0 < inches <= LARGEST_PANEL for inches in figure.panel_size):
        refuse(f"{name}.panel_size", figure.panel_size, f"must be above 0 and at most {LARGEST_PANEL} inches")
    for place, panel in enumerate(figure.panels):
        _check_panel(panel, f"{name}.panels[{place}]")


def check_plot(path: Path) -> None:
    """Find out before measuring whether a picture can be drawn at `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"cannot draw into {path.name!r}: the name must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ForerunError("drawing needs matplotlib, which is not installed; run: pip install 'forerun[plot]'")
    check_output(path, "--plot")


def draw(figure: Figure, path: Path) -> None:
    """The picture at `path`; one that cannot be drawn is refused, and nothing is written."""
    check_plot(path)
    try:
        _draw(figure, path)
    except ForerunError:
        raise
    except Exception as error:  # matplotlib alone knows its colours, marks, formats and formulas
        reason = " ".join(str(error).split())
        raise InvalidArgument(f"the picture cannot be drawn ({reason}); leave --plot out, or measure again") from error


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure for pictures that `Figure` has no words for; no window system is touched."""
    from matplotlib.figure import Figure as Drawn

    return Drawn(figsize=(width, height), layout="constrained")


def finish_axes(axes: Any, x_label: str = "", y_label: str = "", title: str = "") -> None:
    """The house's look: a faint grid, no frame, small labels."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """The picture, whole or not at all."""
    write_whole(path, lambda beside: figure.savefig(beside, dpi=150, format=path.suffix[1:].lower()))


def _check_panel(panel: Panel, name: str) -> None:
    for axis, scale in (("x_scale", panel.x_scale), ("y_scale", panel.y_scale)):
        if scale not in SCALES:
            refuse(f"{name}.{axis}", scale, f"must be one of {', '.join(SCALES)}")
    if panel.x_names and len(panel.x_names) != len(panel.x_ticks):
        refuse(f"{name}.x_names", panel.x_names, f"must hold one for each of {len(panel.x_ticks)} ticks, or none")
    for place, series in enumerate(panel.series):
        _check_series(series, f"{name}.series[{place}]")


def _check_series(series: Series, name: str) -> None:
    if series.kind not in KINDS:
        refuse(f"{name}.kind", series.kind, f"must be one of {', '.join(KINDS)}")
    if series.kind in ("level", "place"):  # one number, and nothing that belongs to it
        values = series.y if series.kind == "level" else series.x
        if not values:
            refuse(name, values, f"must hold where its {series.kind} is")
        return
    if len(series.x) != len(series.y):
        refuse(f"{name}.y", series.y, f"must hold one number for each of {len(series.x)} in x")
    for field, beside in (("error", series.error), ("names", series.names)):
        if beside and len(beside) != len(series.y):
            refuse(f"{name}.{field}", beside, f"must hold one for each of {len(series.y)} values, or none")


def _draw(figure: Figure, path: Path) -> None:
    """All panels; one legend below where they share their marks, or bars leave no room for it; else one in each."""
    columns = max(1, min(figure.columns, len(figure.panels)))
    rows = -(-len(figure.panels) // columns)
    drawn = new_figure(columns * figure.panel_size[0] + 0.5, rows * figure.panel_size[1] + 0.8)
    grid = drawn.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, figure.panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid[len(figure.panels) :]:
        axes.set_axis_off()
    labels = [{series.label for series in panel.series} for panel in figure.panels]
    has_bars = any(series.kind == "bars" for panel in figure.panels for series in panel.series)
    if (has_bars or len(labels) > 1) and all(each <= labels[0] for each in labels):
        handles, names = grid[0].get_legend_handles_labels()
        drawn.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5), frameon=False, fontsize=8)
    else:
        for axes in grid[: len(figure.panels)]:
            if axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False, fontsize=8)
    drawn.suptitle(figure.title, fontsize=11)
    save(drawn, path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    bars = [series for series in panel.series if series.kind == "bars"]
    for place, series in enumerate(panel.series):
        colour = series.colour or COLOURS[place % len(COLOURS)]
        _draw_series(axes, series, colour, bars)
    finish_axes(axes, panel.x_label, panel.y_label, panel.title)
    for scale, change in ((panel.x_scale, axes.set_xscale), (panel.y_scale, axes.set_yscale)):
        if scale != "linear":
            change("log", **({"base": 2} if scale == "log" else {}))
    if panel.x_ticks:
        names = panel.x_names or tuple(f"{tick:g}" for tick in panel.x_ticks)
        width = axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols
        crowded = sum(map(len, names)) > LETTERS_AN_INCH * width
        axes.set_xticks(panel.x_ticks, names, fontsize=8, **({"rotation": 60, "ha": "right"} if crowded else {}))
        axes.minorticks_off()
    if bars:
        axes.margins(x=0.01)
    if panel.y_whole:
        axes.yaxis.get_major_locator().set_params(integer=True)
    if panel.y_format:
        axes.yaxis.set_major_formatter(panel.y_format)
    if panel.y_from is not None and panel.y_scale == "linear":
        axes.set_ylim(bottom=panel.y_from)


def _draw_series(axes: Any, series: Series, colour: str, bars: list[Series]) -> None:
    label = series.label or None
    if series.kind == "level":
        axes.axhline(series.y[0], color=colour, linewidth=0.9, linestyle=series.dashes, label=label)
    elif series.kind == "place":
        axes.axvline(series.x[0], color=colour, linewidth=0.9, linestyle=series.dashes, label=label)
    elif series.kind == "below":
        axes.fill_between(series.x, series.y, color=colour, label=label)
    elif series.kind == "bars":
        width = 0.8 / len(bars)
        shift = (bars.index(series) - (len(bars) - 1) / 2) * width
        error = {"yerr": series.error, "error_kw": {"elinewidth": 0.8}} if series.error else {}
        drawn = axes.bar([x + shift for x in series.x], series.y, width, color=colour, label=label, **error)
        if series.values:
            axes.bar_label(drawn, fmt=series.values, fontsize=7)
    else:
        _draw_marks(axes, series, colour, label)


def _draw_marks(axes: Any, series: Series, colour: str, label: str | None) -> None:
    style: dict[str, Any] = {"color": colour, "marker": series.marker, "markersize": 4, "label": label}
    style["linestyle"] = series.dashes if series.kind == "line" else ""
    if series.kind == "rings":
        style |= {"fillstyle": "none", "markersize": 11}
    if series.error:
        axes.errorbar(series.x, series.y, yerr=series.error, capsize=2, linewidth=1, **style)
    else:
        axes.plot(series.x, series.y, **style)
    names = tuple(series.values % y for y in series.y) if series.values else series.names
    for x, y, name in zip(series.x, series.y, names, strict=False):  # no names, or one a mark
        axes.annotate(name, (x, y), (5, -10), textcoords="offset points", fontsize=7, color=colour)
