"""What Leviathan et al. print, against what the formulas here give."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.papers import theory
from benchmarks.papers.common import Setup, read
from forerun.measure.plot import draw
from forerun.measure.record import Record

PRINTED = {  # alpha, gamma: operations, speed; Table 1 of the paper, drafts for nothing
    (0.6, 2): ("1.53", "1.96"),
    (0.7, 3): ("1.58", "2.53"),
    (0.8, 2): ("1.23", "2.44"),
    (0.8, 5): ("1.63", "3.69"),
    (0.9, 2): ("1.11", "2.71"),
    (0.9, 10): ("1.60", "6.86"),
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    path = tmp_path_factory.mktemp("theory") / "theory.json"
    theory.measure(Setup(), path)
    return read(path)


def test_table_1_as_printed(record: Record) -> None:
    rows = {(r["alpha"], r["gamma"]): (f"{r['operations']:.2f}", f"{r['speed']:.2f}") for r in record.details["table1"]}
    assert rows == PRINTED


def test_figure_2_starts_at_one_and_nears_the_whole_draft(record: Record) -> None:
    for gamma, curve in record.details["figure2"].items():
        assert curve[0] == 1
        assert all(later > earlier for earlier, later in pairwise(curve))
        assert int(gamma) < curve[-1] < int(gamma) + 1 or int(gamma) > 7  # alpha ends at 0.98
    assert record.details["figure2"]["7"][record.details["alphas"].index(0.8)] == pytest.approx(4.1611392)


def test_figure_3_no_drafts_below_c_and_longer_ones_where_they_are_cheap(record: Record) -> None:
    """Corollary 3.9: drafting pays where alpha > c."""
    alphas = record.details["alphas"]
    for cost, curve in record.details["figure3"].items():
        assert all((length > 0) == (alpha > float(cost)) for alpha, length in zip(alphas, curve, strict=True))
        assert all(later >= earlier for earlier, later in pairwise(curve))
    by_cost = list(record.details["figure3"].values())
    for cheap, dear in pairwise(by_cost):
        assert all(long >= short for long, short in zip(cheap, dear, strict=True))


def test_the_picture_is_drawn(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(theory.figure(record), tmp_path / "theory.png")
    assert (tmp_path / "theory.png").stat().st_size > 10_000
