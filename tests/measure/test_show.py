"""A command that measures: what is printed, and the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.seq2seq.__main__ import command as seq2seq
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.record import Record
from forerun.measure.show import INTERRUPTED, MISTAKEN, main, measure, show
from forerun.measure.table import Table
from support.bench import ORIGIN

SPEEDS = Table("Speeds", ("what", "ms"), (("a round", "5.80"),))


def record(**more: Any) -> Record:
    return Record("decode", ORIGIN, {}, tables=(SPEEDS,), remarks=("A remark.",), headline=("Twice as fast.",), **more)


@pytest.mark.parametrize("complete", [True, False])
def test_a_record_is_printed_and_the_status_says_whether_it_is_whole(
    complete: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(output: Path, reporter: Reporter) -> Record:
        reporter.say("something")
        assert output == tmp_path / "here.json"
        return record(complete=complete)

    assert measure("decode", tmp_path / "here.json", None, run) == (0 if complete else INTERRUPTED)
    shown = capsys.readouterr()
    assert "Speeds" in shown.out and "5.80" in shown.out and shown.out.endswith("A remark.\nTwice as fast.\n")
    assert shown.err.startswith("something\nRecord: ")


def test_a_run_without_results_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = Record("decode", ORIGIN, {}, complete=False)
    assert measure("decode", tmp_path / "here.json", None, lambda *_: empty) == INTERRUPTED
    shown = capsys.readouterr()
    assert shown.out == "" and "before anything was measured" in shown.err


def test_a_mistake_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise InvalidArgument("batch=0: must be at least 1")

    assert main(run) == MISTAKEN
    assert capsys.readouterr().err == "Error: batch=0: must be at least 1\n"


def test_a_place_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").touch()
    assert main(lambda: seq2seq(["--output", str(tmp_path / "letter" / "record.json")])) == MISTAKEN
    assert "letter" in capsys.readouterr().err


def test_a_record_without_a_picture_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match="leave --plot out"):
        show(record(), tmp_path / "p.png")
    assert capsys.readouterr().out == ""
