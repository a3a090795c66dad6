"""The record: a table of all cells, those that take more than they may marked, and a picture of the multiples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.matrix.cells import AUTO_MOST, Cell
from benchmarks.matrix.results import Measurement
from forerun.bench.decode.pair import LARGE
from forerun.measure.plot import BLUE, GREY, RED, Figure, Panel, Series
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table
from forerun.measure.turns import TurnsOutcome

KIND = "matrix"
HEADINGS = ("what, rows", "ms a token", "ms a round", "tokens a round", "times", "may be", "of plain", "")
TOO_SLOW = "slower"


def make_record(
    origin: Provenance, settings: Mapping[str, Any], measured: Sequence[Measurement], outcome: TurnsOutcome
) -> Record:
    by_name = {each.cell.name: each for each in measured}
    ordered = sorted(measured, key=lambda each: (each.cell.base or each.cell.name, bool(each.cell.base)))
    return Record(
        KIND,
        origin,
        settings=settings,
        rows=[_stored(each, by_name) for each in ordered],
        tables=(_table(ordered, by_name, settings),) if measured else (),
        remarks=_remarks(origin, settings, outcome),
        headline=_headline(ordered, by_name, settings),
        figure=_figure(ordered, by_name, origin, settings) if measured else None,
        complete=outcome.complete,
    )


def is_too_slow(each: Measurement, by_name: Mapping[str, Measurement], settings: Mapping[str, Any]) -> bool:
    """Whether a cell takes more than it may of the time of the one it is held against, of a token without drafts where
    the policy chooses lengths, or of its own limit."""
    times, of_plain, cell = each.times(by_name.get(each.cell.base)), _of_plain(each, by_name), each.cell
    limit = _limit(cell, settings)
    return (
        (times is not None and cell.most is not None and times > cell.most)
        or (of_plain is not None and of_plain > AUTO_MOST)
        or (limit is not None and 1e3 * each.round > limit)
    )


def _of_plain(each: Measurement, by_name: Mapping[str, Measurement]) -> float | None:
    plain = by_name.get(each.cell.plain)
    return None if plain is None else each.token / plain.token


def _limit(cell: Cell, settings: Mapping[str, Any]) -> float | None:
    """Milliseconds are limited for one pair on one machine."""
    return cell.most_milliseconds if settings["model"] == LARGE else None


def _stored(each: Measurement, by_name: Mapping[str, Measurement]) -> dict[str, Any]:
    fields = asdict(each)
    cell = fields.pop("cell")
    return cell | fields | {"times": each.times(by_name.get(each.cell.base)), "of_plain": _of_plain(each, by_name)}


def _table(ordered: Sequence[Measurement], by_name: Mapping[str, Measurement], settings: Mapping[str, Any]) -> Table:
    rows, alarming = [], []
    for place, each in enumerate(ordered):
        times, limit = each.times(by_name.get(each.cell.base)), _limit(each.cell, settings)
        allowed = f"{each.cell.most:.2f}" if each.cell.most is not None else f"{limit} ms" if limit else NOTHING
        slow, of_plain = is_too_slow(each, by_name, settings), _of_plain(each, by_name)
        if slow:
            alarming.append(place)
        rows.append(
            (
                each.cell.name,
                f"{1e3 * each.token:.2f}",
                f"{1e3 * each.round:.2f}",
                f"{each.tokens_per_round:.2f}",
                NOTHING if times is None else f"{times:.2f}",
                allowed,
                NOTHING if of_plain is None else f"{of_plain:.2f}",
                TOO_SLOW if slow else "",
            )
        )
    return Table("Options and drafters against decoding without them", HEADINGS, tuple(rows), alarming=tuple(alarming))


def _remarks(origin: Provenance, settings: Mapping[str, Any], outcome: TurnsOutcome) -> tuple[str, ...]:
    lines = [
        f"{origin.machine.name}; {settings['model']}, {settings['tokens']} new tokens a row at temperature 1, the "
        f"middle of {settings['repeats']} seeds, from the third round until a row ends",
        "times: of the cell it is held against: plain decoding, the second drafter alone for a chain, the same round "
        f"without the option. Rounds are compared where lengths are fixed, tokens elsewhere. {TOO_SLOW}: more than it "
        f"may be, or a token where the policy chooses lengths more than {AUTO_MOST} of plain decoding's (of plain, "
        "where that is not the cell it is held against)",
        *outcome.problems,
    ]
    if not outcome.complete:
        lines.append("Not complete: these are the cells until then.")
    return tuple(lines)


def _headline(
    ordered: Sequence[Measurement], by_name: Mapping[str, Measurement], settings: Mapping[str, Any]
) -> tuple[str, ...]:
    slow = [each.cell.name for each in ordered if is_too_slow(each, by_name, settings)]
    judged = [each for each in ordered if each.cell.most is not None or _limit(each.cell, settings) is not None]
    return (f"{len(judged) - len(slow)} of {len(judged)} cells are as fast as they should be",)


def _figure(
    ordered: Sequence[Measurement],
    by_name: Mapping[str, Measurement],
    origin: Provenance,
    settings: Mapping[str, Any],
) -> Figure:
    """A bar a cell: blue as it should be, red slower than that."""
    shown = [(each, each.times(by_name.get(each.cell.base))) for each in ordered if each.cell.base in by_name]
    series = []
    for label, colour, slow in (("as it should be", BLUE, False), ("slower than it may be", RED, True)):
        points = [
            (float(place), times)
            for place, (each, times) in enumerate(shown)
            if times is not None and is_too_slow(each, by_name, settings) is slow
        ]
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(label, x, y, "points", colour, values="%.2f"))
    series.append(Series("the same time", (0.0,), (1.0,), "level", GREY, dashes="--"))
    names = tuple(each.cell.name for each, _ in shown)
    panel = Panel(
        "", "", "times what it is held against", tuple(series), tuple(map(float, range(len(shown)))), names,
        y_scale="log",
    )  # fmt: skip
    return Figure(f"Beside the fast path, {origin.machine.name}", (panel,), panel_size=(max(8.0, 0.32 * len(shown)), 6))
