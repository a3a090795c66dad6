"""`forerun bench cpu`: steps that leave no trace, floors by hand, turns, the record and its tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import forerun.loading
from bench.fakes import ORIGIN
from forerun import kernels
from forerun.bench import records
from forerun.bench.cpu import expected, floors, record, report, run, steps
from forerun.bench.cpu.record import CpuRecord, StepTimes
from forerun.bench.cpu.steps import Grid, Inputs, Ours, Subject, Transformers
from forerun.bench.work import Limits, Work, work_of
from forerun.cli.main import INTERRUPTED, cli
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.measure import provenance as quiet
from support.heads import head_of
from support.tiny import draft_of, tiny_model

needs_kernels = pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here")
GRID = Grid(batches=(1, 3), tokens=(1, 2), past=9, repeats=2)
LIMITS = Limits(bytes_per_second=1000.0, operations_per_second=10_000.0, buffer_bytes=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "cores_of_others", lambda: 0.0)
    monkeypatch.setattr(run, "measure_limits", lambda: LIMITS)


def subject(name: str = "target") -> Subject:
    return Subject(name, tiny_model("llama"))


class TestSteps:
    @pytest.mark.parametrize("use", [Kernels.OFF, Kernels.ON])
    def test_ours_leave_the_rows_as_they_were(self, use: Kernels) -> None:
        way = Ours(subject(), Inputs(subject(), GRID), use)
        for tokens in (2, 1):
            assert way.step(3, tokens) > 0
            assert [way.scorer.length(row) for row in range(3)] == [9, 9, 9]

    def test_transformers_cache_is_cut_back(self) -> None:
        way = Transformers(subject(), Inputs(subject(), GRID))
        for tokens in (2, 1):
            assert way.step(3, tokens) > 0
            assert way._caches[3].get_seq_length() == 9

    def test_new_tokens_are_scored_however_many(self) -> None:
        """As many as there are keys, too: a step must not be taken for the filling of the cache."""
        grid = Grid(batches=(1,), tokens=(4,), past=4, repeats=1)
        way = Ours(subject(), Inputs(subject(), grid), Kernels.OFF)
        scored: list[Any] = []
        real = way.scorer.score
        way.scorer.score = lambda *a: scored.append(real(*a)) or scored[-1]  # type: ignore[method-assign,func-returns-value]
        way.step(1, 4)
        assert [len(logits) for logits in scored] == [4]

    def test_a_body_without_tokens(self) -> None:
        body = Subject("body", head_of(tiny_model("llama")).body, headless=True)
        for way in steps.ways(body, GRID, Kernels.OFF).values():
            assert way.step(3, 2) > 0

    def test_ways_take_turns(self) -> None:
        diary: list[tuple[str, int, int]] = []

        class Fake:
            def __init__(self, name: str) -> None:
                self.name = name

            def step(self, batch: int, tokens: int) -> float:
                diary.append((self.name, batch, tokens))
                return float(len(diary))

        kept: list[tuple[str, int, int, float]] = []
        fakes = {name: Fake(name) for name in "ab"}
        steps.sweep(fakes, Grid((1, 2), (1,)), lambda *step: kept.append(step), lambda what: None)
        assert diary == [(n, b, 1) for b in (1, 2) for n in "ab" for _ in range(2)]
        assert [step[-1] for step in kept] == [2, 4, 6, 8], "the first of two calls wakes the threads"


class TestFloors:
    def test_reading_or_calculating_whichever_takes_longer(self) -> None:
        work = Work(weight_bytes=5000, operations_per_token=1000, bytes_per_key=10, operations_per_key=2)
        assert work.least_seconds(LIMITS, 1, 1, 9) == pytest.approx((5000 + 10 * 10) / 1000)
        # eight rows of eight tokens: 64 000 operations by weights, and 10 + 11 + .. + 17 keys a row in attention
        assert work.least_seconds(LIMITS, 8, 8, 9) == pytest.approx((64_000 + 8 * 108 * 2) / 10_000)

    def test_work_of_a_model_counted_by_hand(self) -> None:
        """Hidden 32, four heads of 8, two key heads, 48 in the middle, two layers, 97 tokens."""
        layer = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32
        found = work_of(subject().model)
        assert found.operations_per_token == 2 * (2 * layer + 97 * 32)
        assert found.weight_bytes == 4 * (2 * (layer + 2 * 32) + 97 * 32 + 32)
        assert (found.bytes_per_key, found.operations_per_key) == (2 * 2 * 2 * 8 * 4, 2 * 4 * 4 * 8)

    def test_a_tied_head_is_read_an_embedding_is_not(self) -> None:
        tied = work_of(tiny_model("llama", tie_word_embeddings=True))
        assert tied == work_of(subject().model)

    def test_real_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(floors, "_buffer_bytes", lambda: 16 << 20)
        found = floors.measure_limits()
        assert found.bytes_per_second > 1e8 and found.operations_per_second > 1e8

    def test_the_buffer_is_larger_than_the_last_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(floors, "LAST_CACHE", tmp_path / "size")
        assert floors._last_cache() == 0
        (tmp_path / "size").write_text("98304K\n")
        assert floors._last_cache() == 96 << 20
        assert floors._buffer_bytes() > 4 * (96 << 20)


def made(way_seconds: dict[str, float], **more: Any) -> CpuRecord:
    """Every step costs its way's seconds a position, the first position twice as much."""
    measurements = tuple(
        StepTimes("target", way, batch, tokens, (seconds * (1 + batch * tokens), seconds * (2 + batch * tokens)))
        for way, seconds in way_seconds.items()
        for batch in GRID.batches
        for tokens in GRID.tokens
    )
    settings = {"model": "m", "past": 9, "repeats": 2}
    return CpuRecord(
        **{
            "provenance": ORIGIN,
            "settings": settings,
            "titles": {way: way.upper() for way in way_seconds},
            "limits": LIMITS,
            "work": {"target": Work(5, 10, 1, 2)},
            "complete": True,
            "measurements": measurements,
            **more,
        }
    )


class TestReport:
    def test_ratios_are_to_the_baselines_one_token_step(self) -> None:
        found = made({"transformers": 0.1, "kernels": 0.05})
        cells = report.tables(found)[0].rows[0]
        assert cells[:3] == ("1", "250.0 (200.0) 1.00x", "125.0 (100.0) 0.50x")

    def test_without_batch_one_there_are_no_ratios(self) -> None:
        found = made({"transformers": 0.1})
        few = made({}, titles=found.titles, measurements=tuple(m for m in found.measurements if m.batch == 3))
        assert report.tables(few)[0].rows[0][1] == "450.0 (400.0) -"

    def test_auto_believes_what_was_measured(self) -> None:
        found = made({"transformers": 0.1, "kernels": 0.05})
        learnt = expected.costs(found, "target", "kernels")
        assert expected.believed(learnt, 1, 1) == pytest.approx(0.1)
        assert expected.believed(learnt, 3, 2) == pytest.approx(0.35)

    def test_draft_lengths_follow_cost_and_acceptance(self) -> None:
        """Flat costs invite drafts, costs in proportion to the positions do not."""

        def lengths(seconds: Any) -> list[int]:
            own = [StepTimes("target", "kernels", 1, t, (seconds(t),)) for t in (1, 2, 4, 8, 16)]
            learnt = expected.costs(made({"kernels": 1.0}, measurements=tuple(own)), "target", "kernels")
            return [expected.draft_length(learnt, 1, a, 0.0) for a in (0.5, 0.9)]

        few, many = lengths(lambda t: 1 + 0.02 * t)
        assert 2 <= few < many
        assert lengths(lambda t: float(t)) == [0, 0]
        flat = made({"kernels": 1.0}, measurements=(StepTimes("target", "kernels", 1, 1, (1.0,)),))
        learnt = expected.costs(flat, "target", "kernels")
        assert expected.draft_length(learnt, 1, 0.9, 5.0) == 0, "a draft dearer than the target never pays"

    def test_remarks(self) -> None:
        text = "\n".join(report.remarks(made({"transformers": 0.1}, complete=False, notes=("noisy",))))
        assert "Note: noisy." in text and "Interrupted" in text and "A chip, 2 threads" in text


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    found = made({"transformers": 0.1, "kernels": 0.05})
    records.write(found, tmp_path / "r.json", report.summary(found))
    assert record.read(tmp_path / "r.json") == found
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["summary"]["target"][0]["ratio"] == 1.0
    del content["limits"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match="damaged"):
        record.read(tmp_path / "r.json")


class TestQuiet:
    def test_busy_neighbours_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quiet, "cores_of_others", lambda: 1.25)
        assert "1.2 cores busy when this ended" in str(quiet.busy_note("ended"))
        monkeypatch.setattr(quiet, "cores_of_others", lambda: 0.1)
        assert quiet.busy_note() is None
        monkeypatch.setattr(quiet, "cores_of_others", lambda: None)
        assert quiet.busy_note() is None

    def test_the_systems_own_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quiet, "STAT", tmp_path / "stat")
        monkeypatch.setattr(quiet.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(quiet.time, "process_time", lambda: 2.0)
        assert quiet._busy_seconds() is None
        (tmp_path / "stat").write_text("cpu  300 100 200 9999 77 10 20 0 55 0\ncpu0 1 2 3\n")
        assert quiet._busy_seconds() == pytest.approx(6.3 - 2.0)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model and a draft, both tiny."""
    target = copy.deepcopy(tiny_model("llama"))
    known = {"embedded": target, "small": draft_of(target)}
    monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: (known[name], None))


def bench_cpu(*arguments: str) -> Result:
    small = ["--batch-sizes", "1,3", "--tokens", "1,2", "--past", "9", "--repeats", "2"]
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["bench", "cpu", *small, *arguments])


@needs_kernels
@pytest.mark.usefixtures("models")
def test_the_command(tmp_path: Path) -> None:
    output, picture = tmp_path / "cpu.json", tmp_path / "cpu.png"
    done = bench_cpu("--draft", "small", "--kernels", "on", "--output", str(output), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    for words in ("Target, batch 3", "Draft, batch 1", "Forerun, kernels on", "auto expects", "batch 3, draft"):
        assert words in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = record.read(output)
    assert found.complete and len(found.measurements) == 2 * 3 * 2 * 2
    assert all(len(m.seconds) == 2 for m in found.measurements)
    assert found.settings["kernels"] == "on" and found.provenance.machine.device == "cpu"
    again = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["bench", "show", str(output)])
    assert again.stdout == done.stdout


@pytest.mark.usefixtures("models")
def test_without_kernels_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not_numba", lambda: "No module named 'numba'; pip install numba")
    done = bench_cpu("--kernels", "auto", "--output", str(tmp_path / "cpu.json"))
    assert done.exit_code == 0, done.output
    assert "no kernels were measured (No module named 'numba'; pip install numba)" in done.stdout
    assert list(record.read(tmp_path / "cpu.json").titles) == ["transformers", "modules"]


@pytest.mark.usefixtures("models")
def test_control_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*arguments)

    real = run.sweep
    monkeypatch.setattr(run, "sweep", interrupted)
    done = bench_cpu("--kernels", "off", "--output", str(tmp_path / "cpu.json"))
    assert done.exit_code == INTERRUPTED
    found = record.read(tmp_path / "cpu.json")
    assert not found.complete and {len(m.seconds) for m in found.measurements} == {1}


@pytest.mark.usefixtures("models")
def test_too_many_keys_are_refused(tmp_path: Path) -> None:
    done = bench_cpu("--past", "511", "--output", str(tmp_path / "cpu.json"))
    assert done.exit_code == 2
    assert "511 keys and 2 new tokens do not fit the context of 512" in done.stderr


def test_options_of_the_comparison_are_not_taken() -> None:
    done = CliRunner().invoke(cli, ["bench", "--quick", "cpu"])
    assert done.exit_code == 2 and "--quick" in done.output
