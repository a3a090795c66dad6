"""What was saved is what is loaded, other files are refused in a line, and a record tells nothing about folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import InvalidArgument
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.record import Record, as_json, default_path, load
from forerun.measure.table import Table
from support.bench import ORIGIN


class Kind(StrEnum):
    FAST = "fast"


@dataclass(frozen=True)
class Row:
    lengths: tuple[int, ...]
    kind: Kind


def whole() -> Record:
    series = Series("ours", (1.0, 2.0), (3.0, 4.0), error=(0.1, 0.2), values="%.1f")
    return Record(
        "a kind", ORIGIN, {"sizes": (1, 2), "file": Path("/home/me/model")}, rows=[as_json(Row((1, 2), Kind.FAST))],
        details={"by length": {4: 0.5}}, tables=(Table("T", ("a", "b"), (("x", "1"),), last_is_total=True),),
        remarks=("one",), headline=("two",), figure=Figure("F", (Panel("P", "x", "y", (series,)),)), complete=False,
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    whole().save(path)
    assert load(path) == whole() == load(path, "a kind")
    assert not list(tmp_path.rglob("*.part"))


def test_nothing_is_kept_where_nothing_was_measured(tmp_path: Path) -> None:
    nothing = replace(whole(), rows=())
    assert nothing.kept(tmp_path / "r.json") is nothing and not list(tmp_path.iterdir())
    assert whole().kept(tmp_path / "r.json") == load(tmp_path / "r.json")


def test_lists_of_numbers_take_one_line(tmp_path: Path) -> None:
    rows = [{"numbers": [1, -2.5, 3e-7, None], "words": ["1,\n2", "b"], "pairs": [[1, 2], [3]], "none": []}]
    record, path = replace(whole(), rows=rows), tmp_path / "r.json"
    record.save(path)
    assert '"numbers": [1, -2.5, 3e-07, null],\n' in path.read_text() and load(path) == record


def test_everything_becomes_what_json_gives_back() -> None:
    record = whole()
    assert record.settings == {"sizes": [1, 2], "file": "model"}, "and folders are left out"
    assert record.rows == [{"lengths": [1, 2], "kind": "fast"}] and record.details == {"by length": {"4": 0.5}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "not JSON"),
        ("[]", "no record of a measurement; give a file that `forerun bench` wrote"),
        ('{"prompt": "a"}', "no record of a measurement; give a file that `forerun bench` wrote"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "kind": "decode"}', "format 1"),
        ('{"format": 2, "kind": "decode"}', "damaged"),
        ('{"what": 1, "runs": 2}', "no record of a measurement.*train_losses"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        load(path)


@pytest.mark.parametrize("name", ["provenance", "rows", "tables", "figure", "complete"])
def test_a_damaged_record_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.json"
    content: dict[str, Any] = json.loads(whole().text())
    del content[name]
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match="damaged record"):
        load(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("settings",), [], "settings=.*must be an object"),
        (("rows", 0), "x", r"rows\[0\]='x': must be an object"),
        (("remarks", 0), 1, r"remarks\[0\]=1: must be text"),
        (("headline", 0), "\ud800", "surrogates"),
        (("details", "a"), "\ud800", "surrogates"),
        (("complete",), 1, "True or False"),
        (("provenance", "versions", "torch"), 2, r"versions\['torch'\]=2: must be text"),
        (("provenance", "machine", "cores"), 2.5, "whole number"),
        (("provenance", "machine", "colour"), "red", "'colour': is no name"),
        (("tables", 0, "headings"), [], "headings"),
        (("tables", 0, "rows", 0), ["x"], r"rows\[0\]=.*each of 2 headings"),
        (("tables", 0, "rows", 0, 1), [], r"rows\[0\]\[1\]=\[\]: must be text"),
        (("figure",), True, "figure=True: must be an object"),
        (("figure", "panel_size"), [6.0], "must hold 2 entries"),
        (("figure", "panel_size", 0), 1e9, "50 inches"),
        (("figure", "panels", 0, "x_scale"), "x", "linear, log"),
        (("figure", "panels", 0, "x_names"), ["x"], "each of 0 ticks"),
        (("figure", "panels", 0, "series", 0, "kind"), "pie", "must be one of line"),
        (("figure", "panels", 0, "series", 0, "y"), [1.0], "each of 2 in x"),
        (("figure", "panels", 0, "series", 0, "y", 0), 10**400, "64 bits"),
        (("figure", "panels", 0, "series", 0, "y", 0), True, "must be a number"),
        (("figure", "panels", 0, "series", 0, "error"), [1.0], "each of 2 values"),
    ],
)
def test_a_value_of_another_type_is_named(
    tmp_path: Path, place: tuple[str | int, ...], value: object, message: str
) -> None:
    path = tmp_path / "r.json"
    content: Any = json.loads(whole().text())
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=f"damaged record .*{message}"):
        load(path)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    whole().save(tmp_path / "r.json")
    with pytest.raises(InvalidArgument, match="kind 'a kind', not of 'plan'"):
        load(tmp_path / "r.json", "plan")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        load(tmp_path / "none.json")


def test_where_records_go(tmp_path: Path) -> None:
    now = datetime(2030, 1, 2, 3, 4, 5)
    assert default_path(now=now, start=tmp_path) == tmp_path / "bench-2030-01-02-030405.json"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "src" / "forerun").mkdir(parents=True)
    inside = default_path(now=now, start=tmp_path / "src")
    assert inside == tmp_path / "benchmarks" / "results" / "bench-2030-01-02-030405.json"
