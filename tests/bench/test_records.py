"""What was written is what is read, and a record tells nothing about folders."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch

from bench.fakes import measurement, record_of
from forerun.bench import records
from forerun.bench.records import Agreement, Refusal
from forerun.errors import InvalidArgument
from forerun.measure.provenance import provenance
from forerun.measure.record import default_path


def test_round_trip(tmp_path: Path) -> None:
    agreement = Agreement(identical=3, ties=1, different=0)
    record = record_of(
        [
            measurement("generate", 4, "qa", 0, 2.5),
            measurement("forerun", 4, "qa", 0, 1.25, agreement=agreement, drafted=9, accepted=4, phases={"draft": 0.1}),
        ],
        Refusal("lookup", 4, "one at a time"),
        complete=False,
    )
    path = tmp_path / "new" / "r.json"
    records.write(record, path, {"4": {}})
    assert records.read(path) == record
    assert not list(tmp_path.rglob("*.part"))


def test_the_order_of_methods_survives(tmp_path: Path) -> None:
    record = record_of([measurement("generate", 1, "qa", 0, 1.0), measurement("forerun", 1, "qa", 0, 1.0)])
    records.write(record, tmp_path / "r.json")
    assert records.read(tmp_path / "r.json").baseline == "generate"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "not JSON"),
        ("[]", "format None"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "kind": "decode"}', "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        records.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        records.read(tmp_path / "none.json")


def test_provenance_is_json_and_has_no_folders() -> None:
    origin = provenance("cpu", ["forerun", "bench", "--data=/home/me/q.jsonl", "--output", "/a/b/r.json", "x/y"])
    assert origin.command == "forerun bench --data=q.jsonl --output r.json x/y"
    assert origin.machine.cores >= 1
    assert origin.machine.threads == torch.get_num_threads()
    assert origin.machine.cpu
    assert set(origin.versions) - {"numba"} == {"forerun", "python", "torch", "transformers"}
    assert datetime.fromisoformat(origin.date).utcoffset() is not None


def test_where_records_go(tmp_path: Path) -> None:
    now = datetime(2030, 1, 2, 3, 4, 5)
    assert default_path(now=now, start=tmp_path) == tmp_path / "bench-2030-01-02-030405.json"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "src" / "forerun").mkdir(parents=True)
    inside = default_path(now=now, start=tmp_path / "src")
    assert inside == tmp_path / "benchmarks" / "results" / "bench-2030-01-02-030405.json"
