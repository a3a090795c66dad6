"""`python -m forerun.bench.NAME`: what is printed, and the exit status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.bench.attention.__main__ import main as attention
from forerun.bench.command import INTERRUPTED, MISTAKEN, measured
from forerun.bench.decode.__main__ import main as decode
from forerun.errors import InvalidArgument
from forerun.measure.table import Table


def outcome(tmp_path: Path, measure: Any) -> int:
    def tables(record: Any) -> list[Table]:
        return [Table("Speeds", ("what", "ms"), (("a round", record.seconds),))]

    return measured("decode", ["--quick"], tmp_path / "here.json", measure, tables, lambda record: ["A remark."])


@pytest.mark.parametrize("complete", [True, False])
def test_a_record_is_printed_and_the_status_says_whether_it_is_whole(
    complete: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def measure(output: Path, listener: Any, command: list[str]) -> Any:
        listener.starting("something")
        seen.append((output, command))
        return SimpleNamespace(complete=complete, seconds="5.80")

    assert outcome(tmp_path, measure) == (0 if complete else INTERRUPTED)
    shown = capsys.readouterr()
    assert "Speeds" in shown.out and "5.80" in shown.out and shown.out.endswith("A remark.\n")
    assert shown.err == "something\n"
    assert seen == [(tmp_path / "here.json", ["python", "-m", "forerun.bench.decode", "--quick"])]


def test_a_mistake_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(*_: Any) -> Any:
        raise InvalidArgument("batch=0: must be at least 1")

    assert outcome(tmp_path, measure) == MISTAKEN
    assert capsys.readouterr().err == "Error: batch=0: must be at least 1\n"


@pytest.mark.parametrize("main", [decode, attention])
def test_a_place_that_cannot_be_written_is_told_before_measuring(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").touch()
    assert main(["--output", str(tmp_path / "letter" / "record.json")]) == MISTAKEN
    assert "letter" in capsys.readouterr().err
