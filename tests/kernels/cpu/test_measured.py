"""Choices by timing: made once, kept on disk, repeated when the file is no good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from forerun import ops
from forerun.config import Kernels
from forerun.kernels.cpu import choice, measured


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    measured.forget()
    choice._wins.cache_clear()


def test_measured_once_then_read_from_disk() -> None:
    calls: list[int] = []
    for _ in range(2):
        assert measured.remembered("a thing", lambda: calls.append(1) or 7) == 7
    measured.forget()
    assert measured.remembered("a thing", lambda: calls.append(1) or 8) == 7
    assert len(calls) == 1


def test_what_another_process_wrote_is_kept() -> None:
    measured.remembered("mine", lambda: 1)
    content = json.loads(measured.path().read_text())
    content["measured"]["theirs"] = 2
    measured.path().write_text(json.dumps(content))
    measured.remembered("more", lambda: 3)
    assert json.loads(measured.path().read_text())["measured"] == {"mine": 1, "theirs": 2, "more": 3}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"measured": 3}'])
def test_a_damaged_file_means_measuring_again(content: str) -> None:
    measured.path().parent.mkdir(parents=True)
    measured.path().write_text(content)
    assert measured.remembered("a thing", lambda: 7) == 7
    assert json.loads(measured.path().read_text())["measured"]["a thing"] == 7


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert measured.remembered("a thing", lambda: 7) == 7


def test_calls_that_lost_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate is disturbed three times out of four, and is slow then; its best undisturbed call is its time."""
    state = {"clock": 0.0, "preemptions": 0, "calls": 0}

    def steady() -> None:
        state["clock"] += 0.010

    def disturbed() -> None:
        state["calls"] += 1
        is_hit = state["calls"] % 4 != 0
        state["preemptions"] += is_hit
        state["clock"] += 0.001 if is_hit else 0.003  # a wrong time may as well be too short

    monkeypatch.setattr(measured.time, "perf_counter", lambda: state["clock"])
    monkeypatch.setattr(measured, "_preemptions", lambda: state["preemptions"])
    assert measured.seconds({"a": steady, "b": disturbed}) == pytest.approx({"a": 0.010, "b": 0.003})
    assert state["calls"] >= 16, "it goes on until there were four"


def test_an_answer_from_a_busy_moment_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(10**6))
    monkeypatch.setattr(measured, "_preemptions", lambda: next(number))
    monkeypatch.setattr(measured, "PATIENCE", 0.01)
    asked: list[int] = []

    def measure() -> int:
        asked.append(1)
        measured.seconds({"a": lambda: None})
        return len(asked)

    assert measured.remembered("a thing", measure) == measured.remembered("a thing", measure) == 1
    assert measured.known() == {"a thing": 1} and not measured.path().exists()
    measured.remembered("another", lambda: 5)
    assert json.loads(measured.path().read_text())["measured"] == {"another": 5}
    measured.forget()
    monkeypatch.setattr(measured, "_preemptions", lambda: 0)
    assert measured.remembered("a thing", measure) == 2
    assert json.loads(measured.path().read_text())["measured"]["a thing"] == 2


@pytest.mark.parametrize(("switches", "is_kept"), [(5, True), (10, False)])
def test_long_calls_outlast_the_systems_own_threads(
    switches: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of a tenth of a second meets some of them on any machine; twice as many are another program's."""
    state = {"clock": 0.0, "preemptions": 0}

    def work() -> None:
        state["clock"] += 0.1
        state["preemptions"] += switches

    monkeypatch.setattr(measured.time, "perf_counter", lambda: state["clock"])
    monkeypatch.setattr(measured, "_preemptions", lambda: state["preemptions"])
    assert measured.remembered("a pass", lambda: measured.seconds({"a": work})) == pytest.approx({"a": 0.1})
    assert measured.path().exists() == is_kept


def test_preemptions_are_counted_here() -> None:
    assert measured._preemptions() >= 0 and measured.resource is not None


def test_the_faster_product_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: ours wins for few rows and loses for many, and the choice follows."""
    used: list[str] = []
    real = choice.linear
    times = {str(size): ((1.0, 2.0) if size <= 4 else (2.0, 1.0)) for size in choice.BUCKETS}
    monkeypatch.setattr(choice, "compare", lambda shape, threads: times)
    monkeypatch.setattr("forerun.kernels.cpu.linear.linear", lambda *a: used.append("ours") or real(*a))
    weight = torch.randn(8, 16)
    for rows in (1, 3, 4, 5, 32):
        ops.linear(torch.randn(rows, 16), weight)
    assert used == ["ours"] * 3


def test_a_tie_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "compare", lambda *a: {str(size): (0.97, 1.0) for size in choice.BUCKETS})
    assert not choice.is_faster(torch.zeros(8, 16), 1)


def test_real_timings_have_every_bucket() -> None:
    found = choice.compare((64, 32), 1)
    assert {int(size) for size in found} == set(choice.BUCKETS)
    assert all(ours > 0 and theirs > 0 for ours, theirs in found.values())


@pytest.mark.parametrize("use", list(Kernels))
def test_every_setting_gives_the_same_product(use: Kernels) -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    torch.testing.assert_close(ops.linear(x, weight, bias, use), x @ weight.T + bias)


def test_other_dtypes_and_odd_widths_go_to_torch() -> None:
    double = torch.randn(2, 16).double(), torch.randn(8, 16).double()
    for x, weight in (double, (torch.randn(2, 7), torch.randn(8, 7))):
        torch.testing.assert_close(ops.linear(x, weight, None, Kernels.ON), x @ weight.T)
