"""The matrix: every cell names one it is held against, and a run leaves a record that marks what is too slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.matrix.__main__ import command
from benchmarks.matrix.cells import AUTO_MOST, DRAFTERS, MODEL, OPTIONS, PLAIN, cells
from benchmarks.matrix.report import TOO_SLOW, make_record
from benchmarks.matrix.results import Measurement
from benchmarks.matrix.run import select
from forerun.measure.provenance import provenance
from forerun.measure.record import load
from forerun.measure.turns import TurnsOutcome


def test_every_cell_can_be_made_and_is_held_against_another() -> None:
    known = {cell.name: cell for cell in cells()}
    assert len(known) == len(cells())
    for cell in known.values():
        assert cell.drafter in DRAFTERS and (not cell.option or cell.option in OPTIONS)
        assert all(known[other].batch == cell.batch for other in (cell.base, cell.plain) if other)
        assert len(cell.requests()) == cell.batch
    assert {cell.drafter for cell in known.values()} == set(DRAFTERS)
    assert {cell.option for cell in known.values()} == {"", *OPTIONS}


def test_one_odd_row_is_one() -> None:
    odd = next(cell for cell in cells() if cell.odd_rows == 1)
    assert [bool(request) for request in odd.requests()] == [True] + 7 * [False]


def test_a_choice_brings_what_it_is_held_against() -> None:
    names = [cell.name for cell in select(cells(), "logit bias, 1")]
    assert names == [f"{MODEL}, 5 drafted, 1", "logit bias, 1"]


def test_no_drafter_whose_lengths_are_chosen_may_be_slower_than_plain_decoding() -> None:
    known = {cell.name: cell for cell in cells()}
    chosen = [cell for cell in known.values() if cell.policy == "auto" and not cell.option]
    assert {cell.drafter for cell in chosen} == set(DRAFTERS) - {PLAIN}
    for cell in chosen:
        held, base = known[cell.plain or cell.base], known[cell.base]
        assert held.drafter == PLAIN and held.context == cell.context
        assert cell.plain or (cell.most is not None and cell.most <= AUTO_MOST)
        assert base.drafter == PLAIN or cell.drafter == f"lookup, {base.drafter}"


@pytest.mark.parametrize(("milliseconds", "marked"), ((1.02, ""), (1.04, TOO_SLOW)))
def test_a_chain_slower_than_plain_is_marked_though_it_is_as_fast_as_its_drafter(
    milliseconds: float, marked: str
) -> None:
    known = {cell.name: cell for cell in cells()}
    chain = known["lookup, draft model, auto, 1"]
    measured = [_took(known[chain.plain], 1.0), _took(known[chain.base], 1.01), _took(chain, milliseconds)]
    made = make_record(
        provenance(torch.device("cpu"), []), {"model": "", "tokens": 8, "repeats": 1}, measured, TurnsOutcome()
    )
    marks = {row[0]: row[-1] for row in made.tables[0].rows}
    assert marks[chain.name] == marked and milliseconds / 1.01 < (chain.most or 0)


@pytest.mark.parametrize(("milliseconds", "marked"), ((1.0, ""), (1.2, TOO_SLOW)))
def test_what_takes_more_than_it_may_is_marked(milliseconds: float, marked: str) -> None:
    known = {cell.name: cell for cell in cells()}
    cell = replace(known["logit bias, 1"], most=1.1)
    measured = [_took(known[cell.base], 1.0), _took(cell, milliseconds)]
    record = make_record(
        provenance(torch.device("cpu"), []), {"model": "", "tokens": 8, "repeats": 1}, measured, TurnsOutcome()
    )
    assert [row[-1] for row in record.tables[0].rows] == ["", marked]
    assert record.tables[0].alarming == ((1,) if marked else ())


def _took(cell: object, milliseconds: float) -> Measurement:
    return Measurement(cell, (milliseconds / 1e3,), (milliseconds / 1e3,), 1.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "matrix.json", tmp_path / "matrix.png"
    asked = ["--only", "one row of 8", "--tokens", "32", "--repeats", "1", "--contexts", "16", "--device", "cpu"]
    assert command([*asked, "--output", str(output), "--plot", str(picture)]) == 0
    record = load(output)
    assert record.complete and picture.stat().st_size
    assert [row["name"] for row in record.rows][1:] == [
        "one row of 8: repetition penalty",
        "one row of 8: python processor",
    ]
    assert all(row["times"] > 0 for row in record.rows[1:]) and record.rows[0]["times"] is None
    assert "one row of 8: python processor" in capsys.readouterr().out


def test_texts_that_are_too_short_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--only", "one row of 8: rep", "--tokens", "6", "--repeats", "1", "--contexts", "16", "--device", "cpu"]
    assert command([*asked, "--output", str(tmp_path / "matrix.json")]) == 1
    assert "give more --tokens" in capsys.readouterr().err


def test_plain_decoding_is_there_for_every_batch() -> None:
    assert {f"{PLAIN}, 1", f"{PLAIN}, 4"} <= {cell.name for cell in cells((1, 4))}
