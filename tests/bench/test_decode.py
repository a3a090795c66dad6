"""`forerun bench decode`: rounds counted by hand, a small run on the CPU, the record, its tables and its picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import goals
from benchmarks.goals import results_of
from forerun.bench.decode import report, run
from forerun.bench.decode.calls import TimedCall, counted
from forerun.bench.decode.device import DeviceTime
from forerun.bench.decode.forward import Forward, Pass
from forerun.bench.decode.memory import Memory
from forerun.bench.decode.methods import AUTO, BASS, FIXED, METHODS, PLAIN, WatchedPolicy, policy_of
from forerun.bench.decode.pair import LARGE, SMALL, check_pair
from forerun.bench.decode.results import DecodeResults, PeerCall, Startup
from forerun.bench.decode.settings import DecodeSettings, choose_settings
from forerun.bench.hardware import Ceilings, Work
from forerun.bench.settings import DecodeOptions
from forerun.cli.main import INTERRUPTED, cli
from forerun.errors import InvalidArgument
from forerun.measure.plot import draw
from forerun.measure.progress import Silent
from forerun.measure.record import load
from forerun.measure.rounds import Round, Trace
from forerun.measure.timing import busy_seconds
from forerun.policy import BassHeuristic, Constant
from forerun.types import BatchView, RoundOutcome
from support.bench import ORIGIN

BIG, LITTLE = Work(1000, 200, 10, 4), Work(100, 20, 1, 2)


def outcome(drafted: tuple[int, ...], accepted: tuple[int, ...]) -> RoundOutcome:
    rows = tuple(range(len(drafted)))
    return RoundOutcome(
        rows, rows, drafted, accepted, None, sum(drafted) + len(rows), 0.0, 0.0, 0.0, (False,) * len(rows)
    )


def traced() -> TimedCall:
    """Two rows with prompts of 10 and 20 tokens and three more when the clock starts; the first ends first."""
    rounds = (Round(1.0, {}, {0: 3, 1: 1}), Round(1.0, {}, {0: 2, 1: 2}), Round(0.5, {}, {1: 1}))
    result: Any = SimpleNamespace(rows=[SimpleNamespace(tokens=[0] * 8), SimpleNamespace(tokens=[0] * 7)])
    outcomes = [outcome((2, 2), (2, 0)), outcome((2, 1), (1, 1)), outcome((0,), (0,))]
    return counted("fixed 4", (10, 20), Trace(rounds, result), outcomes)


class TestCalls:
    def test_counted_by_hand(self) -> None:
        call = traced()
        assert call.latencies == (2.0 / 5, 2.5 / 4)
        assert (call.first, call.last, call.all) == (0.4, 0.625, pytest.approx(0.5125))
        assert (call.tokens, call.drafted, call.accepted, call.scored) == (9, 7, 4, 12)
        assert call.draft_steps == 2 + 2 + 0
        assert call.key_reads == (13 + 23) + (16 + 24) + 26
        assert call.draft_key_reads == 2 * 36 + 2 * 40

    def test_what_must_be_read_and_calculated(self) -> None:
        call = traced()
        assert call.read(BIG, LITTLE) == 3 * 1000 + 102 * 10 + 4 * 100 + 152 * 1
        attention = 102 * 12 // 5 * 4  # five passes of rows score twelve positions
        assert call.operations(BIG, LITTLE) == 12 * 200 + attention + 7 * 20 + 152 * 2

    def test_plain_decoding_reads_weights_once_a_token(self) -> None:
        plain = replace(traced(), drafted=0, draft_steps=0, draft_key_reads=0, key_reads=0)
        assert plain.read(BIG, LITTLE) == 3 * 1000


class TestDevice:
    def test_overlaps_count_once_and_small_gaps_are_the_devices(self) -> None:
        spans = [(10e-6, 12e-6), (0.0, 5e-6), (3e-6, 6e-6), (6e-6 + 2e-6, 9e-6)]
        assert busy_seconds(spans) == pytest.approx(12e-6)
        assert busy_seconds(spans, gap=0.5e-6) == pytest.approx((6 + 1 + 2) * 1e-6)
        assert busy_seconds([]) == 0

    def test_host_share(self) -> None:
        assert DeviceTime(PLAIN, 1, 5.4e-3, 4e-3, 5e-3, 300).over_device == pytest.approx(1.08)


class TestMethods:
    def test_each_has_its_policy(self) -> None:
        auto = Constant(5)
        found = {method: policy_of(method, auto) for method in METHODS}
        assert found[AUTO] is auto and isinstance(found[BASS], BassHeuristic)
        assert [found[name].n for name in (PLAIN, *FIXED)] == [0, 4, 6, 8]  # type: ignore[attr-defined]
        assert policy_of(BASS, auto) is not found[BASS]

    def test_watching_changes_nothing(self) -> None:
        inner = BassHeuristic()
        watched, view = WatchedPolicy(inner), BatchView((0,), (0,), (99,))
        assert watched.lengths(view) == (7,)
        watched.observe(outcome((7,), (7,)))
        assert inner.length == 9 and len(watched.outcomes) == 1


def calls_of(method: str, batch: int, ms: float, spread: float = 1.2) -> TimedCall:
    times = (0.004,) * 9 + (0.008,)
    rows = tuple(1e-3 * ms * (1 + (spread - 1) * row / max(batch - 1, 1)) for row in range(batch))
    drafted = 0 if method == PLAIN else 60
    return TimedCall(
        method, batch, rows, times, 50, drafted, 40 if drafted else 0, drafted + 10, 60 if drafted else 0, 5000, 0
    )


def made(**more: Any) -> DecodeResults:
    machine = replace(ORIGIN.machine, gpu="A card")
    speeds = {PLAIN: 4.4, "fixed 4": 1.5, BASS: 1.4, AUTO: 1.3}
    parts = {
        "calls_made": tuple(calls_of(m, b, ms * (1 if b == 1 else 1.2)) for b in (1, 8) for m, ms in speeds.items()),
        "ceilings": Ceilings(4.2e12, 3.9e12, 7e14),
        "alpha": 0.868,
        "forward": Forward(
            4e12, (Pass("target", 1, 1, 14_000_000_000, (0.004,)), Pass("draft", 1, 1, 5 * 10**8, (3e-4,)))
        ),
        "startups": (Startup(1, 3.0, 1.0), Startup(8, 4.0, 1.5)),
        "device_times": (
            DeviceTime(PLAIN, 1, 4.4e-3, 4e-3, 4.2e-3, 300),
            DeviceTime("fixed 6", 8, 9e-3, 5e-3, 6e-3, 900),
        ),
        "memory": (Memory(8, 8, 32000, 30 << 20, 10 << 20, 1 << 30), Memory(8, 8, 128256, 80 << 20, 97 << 20, 1 << 20)),
        "peers": (PeerCall("model.generate", 1, 24, 1.7, 24), PeerCall("transformers assisted", 1, 24, 0.8, 5)),
        "notes": ("a part failed",),
    }
    settings = {"pair": LARGE, "wanted_alpha": 0.87, "prompt_length": 448, "new_tokens": 128}
    work = Work(13_200_000_000, 13_200_000_000, 524_288, 524_288), Work(540_000_000, 540_000_000, 32_768, 32_768)
    return DecodeResults(replace(ORIGIN, machine=machine), settings, *work, **parts | more)


class TestReport:
    def test_speed_against_plain_of_the_same_batch(self) -> None:
        rows = {row[:2]: row for row in report.tables(made())[0].rows}
        assert rows["1", AUTO][4] == f"1.30 ({4.4 / 1.3:.2f}x)"
        assert rows["8", AUTO][2] == f"1.56 ({4.4 * 1.1 / 1.3:.2f}x)"
        assert rows["8", PLAIN][3] == f"{4.4 * 1.2 * 1.2:.2f}"

    def test_steady_is_the_middle_round(self) -> None:
        assert made().steady(AUTO, 1) == pytest.approx(0.004 / 5)
        assert made().steady(AUTO, 2) is None

    def test_captures_that_were_taken_out(self) -> None:
        calls = tuple(replace(call, captured=0.25) for call in made().calls_made)
        assert "Capturing took 2.0 s" in report.remarks(made(calls_made=calls), True)[3]

    def test_percentiles(self) -> None:
        half, most, nearly = made().percentiles(AUTO, 1)
        assert half == 0.004 and 0.004 < most < nearly < 0.008

    def test_a_capture_among_the_rounds_counts_as_one_of_the_others(self) -> None:
        slow = replace(calls_of(PLAIN, 1, 4.4), round_seconds=(0.004,) * 9 + (2.0,))
        assert made(calls_made=(slow,)).seconds(PLAIN, 1) == pytest.approx(0.04)

    def test_shares_by_hand(self) -> None:
        record = made()
        read = 10 * 13_200_000_000 + 5000 * 524_288
        assert record.read_share(PLAIN, 1) == pytest.approx(read / 0.044 / 4e12)
        assert replace(record, forward=None).read_share(PLAIN, 1) == pytest.approx(read / 0.044 / 3.9e12)
        assert replace(record, ceilings=None, forward=None).read_share(PLAIN, 1) is None
        assert record.utilisation(PLAIN, 1) == pytest.approx((10 * 13.2e9 + 5000 * 524_288) / 0.044 / 7e14)

    def test_tables(self) -> None:
        latency, rounds, forward, device, memory, peers = report.tables(made())
        assert forward.rows[0] == ("target 1x1", "4.000", "14.00", "88%")
        assert latency.rows[3][:5] == ("1", AUTO, "1.30 (3.38x)", "1.30 (3.38x)", "1.30 (3.38x)")
        assert latency.rows[0][2:] == ("4.40", "4.40", "4.40", "0.80", "5.00", "-", "-")
        assert rounds.rows[0][2] == "4.00" and device.rows[1][-1] == "1.50"
        assert memory.rows[1] == ("128256", "8", "8", "80.0", "97.0", "1.0")
        assert peers.rows[1][2:] == ("33.3", "24", "4.8")

    def test_goals_reached_and_missed(self) -> None:
        lines = "\n".join(goals.goals(made()))
        assert "alpha 0.868 (goal reached" in lines
        assert "target 1x1 forward: 88% of bandwidth (goal reached: 82%)" in lines
        assert "draft 1x1 with its sampling: 0.300 ms (goal missed: 0.25)" in lines
        assert "batch 1, auto: 1.30 ms a token (goal reached: 1.35)" in lines
        assert "batch 8, first row: 3.72x (goal reached: 3.3x)" in lines
        assert "fixed 6: wall over device 1.50 (goal missed" in lines and "97 MiB (goal missed: 96)" in lines
        slow = replace(made(), alpha=0.85)
        assert "alpha 0.850 (goal missed" in goals.goals(slow)[0]

    def test_goals_are_for_the_large_pair_on_a_gpu(self) -> None:
        assert not goals.goals(replace(made(), provenance=ORIGIN))
        assert not goals.goals(replace(made(), settings={**made().settings, "pair": SMALL}))

    def test_remarks(self) -> None:
        lines = report.remarks(made(), complete=False)
        assert (
            "448 tokens of prompt" in lines[0]
            and "4.00 TB/s" in lines[1]
            and "3.0 s at batch 1" in lines[2]
            and "capturing: 2.5 s" in lines[2]
        )
        assert lines[-2] == "Note: a part failed." and lines[-1].startswith("Incomplete")

    def test_a_record_survives_the_disk(self, tmp_path: Path) -> None:
        record, path = report.make_record(made(), complete=True), tmp_path / "decode.json"
        record.save(path)
        assert load(path) == record
        shown = CliRunner().invoke(cli, ["bench", "show", str(path)])
        assert shown.exit_code == 0 and "3.38x" in shown.output

    @pytest.mark.slow
    @pytest.mark.parametrize("results", [made(), made(memory=(), ceilings=None, forward=None)], ids=["gpu", "cpu"])
    def test_the_picture(self, results: DecodeResults, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        draw(report.figure(results), tmp_path / "decode.png")
        assert (tmp_path / "decode.png").stat().st_size > 10_000


def small(**changes: Any) -> DecodeSettings:
    asked = DecodeOptions(model=SMALL, device="cpu", batch_sizes=(1, 3), prompt_length=8, max_new_tokens=48)
    return replace(choose_settings(asked), turns=1, alpha_tokens=64, peer_tokens=4, **changes)


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_ceilings", lambda device, dtype: Ceilings(None, 1e10, 1e10))


@pytest.mark.usefixtures("quick_ceilings")
class TestRun:
    @pytest.mark.slow
    def test_on_the_cpu(self, tmp_path: Path) -> None:
        path = tmp_path / "decode.json"
        record = run.run(small(), path, Silent())
        assert record.complete and record == load(path) and not any("Note" in line for line in record.remarks)
        results = results_of(record)
        assert (results.batches, results.methods) == ([1, 3], list(METHODS))
        assert results.alpha == pytest.approx(0.87, abs=0.05)
        assert [peer.title for peer in results.peers] == ["model.generate", "transformers assisted"]
        for call in results.calls_made:
            assert call.first <= call.last and call.all == pytest.approx(sum(call.latencies) / call.batch)
            # Every row has 48 tokens, fewer than 48 of them after the first two rounds.
            assert call.batch <= call.tokens < 48 * call.batch
            assert call.tokens == call.accepted + call.scored - call.drafted
            assert (call.drafted > 0) == (call.draft_steps > 0) and (call.method != PLAIN or not call.drafted)
        lengths = {m: max(c.drafted / c.draft_steps for c in results.calls(m, 1)) for m in FIXED}
        assert set(lengths.values()) == {1.0}, "alone, a row's draft takes as many passes as it has tokens"

    @pytest.mark.slow
    def test_a_part_that_fails_is_named_and_the_others_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> float:
            raise torch.OutOfMemoryError("no memory\nfor this")

        monkeypatch.setattr(run, "measure_alpha", broken)
        record = run.run(small(batches=(1,)), tmp_path / "d.json", Silent())
        assert "Note: alpha failed (OutOfMemoryError: no memory)." in record.remarks
        assert record.details["peers"] and record.complete

    def test_what_would_be_late_is_left_out(self, tmp_path: Path) -> None:
        record = run.run(small(most_seconds=-1.0, batches=(1,)), tmp_path / "d.json", Silent())
        assert not record.complete and not record.rows and not (tmp_path / "d.json").exists()
        assert "Note: what the hardware allows was left out: the time was over." in record.remarks

    @pytest.mark.slow
    def test_an_interrupt_keeps_what_was_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: Any, **__: Any) -> float:
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "measure_alpha", stop)
        path = tmp_path / "d.json"
        options = ["--batch-sizes", "1", "--max-new-tokens", "40", "--quick", "--device", "cpu", "--output", str(path)]
        done = CliRunner().invoke(cli, ["bench", "decode", *options])
        assert done.exit_code == INTERRUPTED and not load(path).complete
        assert {call["batch"] for call in load(path).rows} == {1} and not load(path).details["peers"]


class TestAsking:
    def test_pairs(self) -> None:
        check_pair(LARGE, None)
        check_pair("some/model", "small/model")
        with pytest.raises(InvalidArgument, match="brings its own draft"):
            check_pair(LARGE, "small/model")
        with pytest.raises(InvalidArgument, match="needs a draft model"):
            check_pair("some/model", None)

    def test_leading_batches_come_first(self) -> None:
        chosen = choose_settings(DecodeOptions(device="cpu"))
        assert chosen.model == SMALL and (chosen.leading, chosen.following) == ((1, 8), (16, 4, 2))
        assert choose_settings(DecodeOptions(device="cpu", batch_sizes=(4,))).leading == (4,)

    def test_the_profiler_comes_when_nothing_is_timed_any_more(self) -> None:
        """It stays with the process, and makes launches slower: most of all those of a peer that records nothing."""
        bench = run.DecodeBench.__new__(run.DecodeBench)
        bench.settings = SimpleNamespace(leading=(1, 8), following=(2,))  # type: ignore[assignment]
        bench.pair = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
        names = [turn.title for turn in bench.parts()]
        assert names[-1] == "rounds under the profiler" and {"transformers", "batch 2", "batch 8"} < set(names)

    def test_too_few_tokens(self) -> None:
        with pytest.raises(InvalidArgument, match="new_tokens=5"):
            choose_settings(DecodeOptions(device="cpu", max_new_tokens=5))

    def test_help_teaches(self) -> None:
        shown = CliRunner().invoke(cli, ["bench", "decode", "--help"]).output
        assert "--quick" in shown and "synthetic:6.7b+0.33b@0.87" in shown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    asked = DecodeOptions(model=SMALL, quick=True, batch_sizes=(1,), prompt_length=16, max_new_tokens=40)
    settings = replace(choose_settings(asked), memory_lengths=(2,), alpha_tokens=64)
    record = run.run(settings, tmp_path / "decode.json", Silent())
    assert record.complete and not any("Note" in line for line in record.remarks)
    results = results_of(record)
    assert results.memory and {each.method for each in results.device_times} == set(run.WATCHED)
    assert results.ceilings is not None and results.ceilings.copy is not None and results.ceilings.linear > 1e11
    assert results.forward is not None and len(results.forward.passes) == 5
