"""Every record that is kept is shown and drawn, or says in a line which command does that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forerun.cli.main import cli
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import Table
from support.bench import ORIGIN

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json"))
ELSEWHERE = {
    "train-losses.json": "benchmarks/train_losses.py",
    **{name: "python -m benchmarks.papers page" for name in RECORDS if name.startswith("papers/")},
}
del ELSEWHERE["papers/kernels.json"]
UNDRAWN = {"asr-cpu.json", "eval-greedy.json", "eval-sampled.json"}


def show(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["bench", "show", *arguments])


@pytest.mark.parametrize("name", RECORDS)
def test_a_kept_record_is_shown_or_says_by_what(name: str) -> None:
    result = show(str(RESULTS / name))
    if name in ELSEWHERE:
        assert result.exit_code == 2
        assert ELSEWHERE[name] in result.stderr
        assert result.stderr.count("\n") == 1
        assert "damaged" not in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert result.stdout


def drawn_slowly(name: str) -> Any:
    """A picture takes a second or two; one of them is drawn in every run."""
    has_picture = json.loads((RESULTS / name).read_text(encoding="utf-8")).get("figure") is not None
    is_quick = not has_picture or name == "seq2seq-h200.json"
    return pytest.param(name, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("name", list(map(drawn_slowly, RECORDS)))
def test_a_kept_record_is_drawn_or_says_why_not(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    result = show(str(RESULTS / name), "--plot", str(picture))
    assert isinstance(result.exception, SystemExit | None), result.exception
    if name in ELSEWHERE or name in UNDRAWN:
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert ELSEWHERE.get(name, "holds no picture: leave --plot out") in result.stderr
        assert not picture.exists()
    else:
        assert result.exit_code == 0, result.output
        assert "<svg" in picture.read_text(encoding="utf-8")


def test_a_record_of_any_kind_is_shown_without_the_code_that_measured_it(tmp_path: Path) -> None:
    Record("from the future", ORIGIN, {}, tables=(Table("Speeds", ("", "x"), (("a", "1"),)),)).save(tmp_path / "r.json")
    result = show(str(tmp_path / "r.json"))
    assert result.exit_code == 0 and "Speeds" in result.stdout


def test_a_picture_without_a_place_is_refused_before_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "letter").touch()
    result = show(str(RESULTS / "seq2seq-h200.json"), "--plot", str(tmp_path / "letter" / "p.png"))
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("damage", [{"colour": "no colour"}, {"marker": "no mark"}, {"values": "%q"}])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_tables(tmp_path: Path, damage: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    series = Series("ours", (1.0, 2.0), (3.0, 4.0), **damage)
    figure = Figure("F", (Panel("P", "x", "y", (series,)),))
    tables = (Table("Speeds", ("", "x"), (("a", "1"),)),)
    Record("a kind", ORIGIN, {}, tables=tables, figure=figure).save(tmp_path / "r.json")
    result = show(str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot be drawn" in result.stderr and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
