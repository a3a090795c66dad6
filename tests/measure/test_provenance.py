"""Where numbers come from, and whether anybody else was at work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from forerun.measure import provenance as module
from forerun.measure.provenance import busy_note, provenance

SOURCES = Path(module.__file__).resolve().parents[1]


def test_it_is_json_and_has_no_folders() -> None:
    origin = provenance("cpu", ["forerun", "bench", "--data=/home/me/q.jsonl", "--output", "/a/b/r.json", "x/y"])
    assert origin.command == "forerun bench --data=q.jsonl --output r.json x/y"
    named = ["lookup,ngram:/home/me/t", "--draft=self:8,/a/b/drafter", "http://a:8/v1", "http://a/v1", "/a/b,c/d"]
    assert provenance("cpu", named).command == "lookup,ngram:t --draft=self:8,drafter http://a:8/v1 http://a/v1 d"
    assert origin.machine.cores >= 1
    assert origin.machine.threads == torch.get_num_threads()
    assert origin.machine.cpu and origin.machine.name == origin.machine.cpu
    assert set(origin.versions) - {"numba"} == {"forerun", "python", "torch", "transformers"}
    assert datetime.fromisoformat(origin.date).utcoffset() is not None
    assert origin.machine.cpu in origin.sentence() and "torch" in origin.sentence()


def test_busy_neighbours_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores_of_others", lambda: 1.25)
    assert "1.2 cores busy when this ended" in str(busy_note("ended"))
    monkeypatch.setattr(module, "cores_of_others", lambda: 0.1)
    assert busy_note() is None
    monkeypatch.setattr(module, "cores_of_others", lambda: None)
    assert busy_note() is None


def test_the_systems_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAT", tmp_path / "stat")
    monkeypatch.setattr(module.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(module.time, "process_time", lambda: 2.0)
    assert module._busy_seconds() is None
    (tmp_path / "stat").write_text("cpu  300 100 200 9999 77 10 20 0 55 0\ncpu0 1 2 3\n")
    assert module._busy_seconds() == pytest.approx(6.3 - 2.0)


def test_a_bare_copy_names_the_commit_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_git", lambda *a: None)
    monkeypatch.delenv("FORERUN_COMMIT", raising=False)
    assert module.commit() is None and module.stamp() is None
    digest = module.code_digest(Path(module.__file__).parents[1])
    for told, said in (
        (f"0123abcd:{digest}", "0123abcd"),
        ("0123abcd:000000000000", "0123abcd-changed"),
        (f"0123abcd-changed:{digest}", "0123abcd-changed"),
        ("0123abcd-changed:000000000000", "0123abcd-changed"),
        ("0123abcd", "0123abcd-unchecked"),
    ):
        monkeypatch.setenv("FORERUN_COMMIT", told)
        assert module.commit() == said


@pytest.mark.slow
def test_a_copy_without_its_repository_knows_whether_it_was_changed(tmp_path: Path) -> None:
    """With real folders and processes: a checkout says what its copy is told, and a changed copy says so."""
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    for path in SOURCES.rglob("*.py"):
        place = checkout / "src" / "forerun" / path.relative_to(SOURCES)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    (checkout / "benchmarks").mkdir()
    (checkout / "benchmarks" / "case.py").write_text("CASES = 3\n")
    (checkout / "benchmarks" / "record.json").write_text("{}\n")
    (checkout / ".gitignore").write_text("__pycache__/\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=checkout, check=True)
    (checkout / "benchmarks" / "record.json").write_text("[]\n")  # a record is no code
    told = _said(checkout, "stamp")
    assert told.startswith(_said(checkout, "commit") + ":") and "changed" not in told
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    assert _said(copy, "commit", told) == told.partition(":")[0]
    for changed in (checkout, copy):
        (changed / "benchmarks" / "case.py").write_text("CASES = 4\n")
    assert _said(copy, "commit", told) == told.partition(":")[0] + "-changed" == _said(checkout, "commit")
    assert _said(copy, "commit", _said(checkout, "stamp")) == _said(checkout, "commit")


def _said(folder: Path, function: str, told: str = "") -> str:
    here = {"FORERUN_COMMIT": told, "PYTHONPATH": str(folder / "src"), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = [sys.executable, "-c", f"from forerun.measure.provenance import {function}; print({function}())"]
    done = subprocess.run(command, env=os.environ | here, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()
