"""`python -m benchmarks.attention`: cases counted by hand, the record and its tables, what happens without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")


from benchmarks.attention import __main__ as plain
from benchmarks.attention import cases, compiling, report, run, sweep
from benchmarks.attention.cases import SDPA, Case, Inputs, all_cases
from benchmarks.attention.results import AttentionResults, Timing, Trial
from benchmarks.compiling import compile_apart
from forerun import kernels
from forerun.cli.main import cli
from forerun.errors import ForerunError, InvalidArgument
from forerun.math.attention import Form
from forerun.measure.progress import Silent
from forerun.measure.record import Record, load
from forerun.measure.show import main
from support.bench import ORIGIN
from support.interpreter import kernel_tests

kernel_tests()

GOAL = Case(32, 8, 8, 8, 64, 4096)
EQUAL = Case(32, 32, 1, 5, 512, 512)
MICROSECONDS = {SDPA: 80.0, Form.PAD: 60.0, Form.SPLIT: 45.0, Form.KEYS: 22.0, Form.AUTO: 22.0}


def made() -> AttentionResults:
    machine = replace(ORIGIN.machine, gpu="A card")
    timings = [
        Timing(case, str(way), (1e-6 * time, 1e-6 * time * 1.1, 1e-6 * time), 0.0)
        for case in (GOAL, EQUAL)
        for way, time in MICROSECONDS.items()
    ]
    titles = {str(way): title for way, title in cases.TITLES.items()}
    return AttentionResults(replace(ORIGIN, machine=machine), 3, titles, 4e12, tuple(timings))


class TestCases:
    def test_counted_by_hand(self) -> None:
        assert GOAL.lengths == (64, 640, 1216, 1792, 2368, 2944, 3520, 4096)
        assert GOAL.live_bytes == 16640 * 8 * 128 * 2 * 2
        assert GOAL.operations == 4 * 16640 * 8 * 32 * 128
        assert EQUAL.lengths == (512,)
        assert EQUAL.layers == 64 and GOAL.layers == 8, "enough layers that none finds its keys in the last cache"

    def test_one_row_is_not_spread(self) -> None:
        found = all_cases((1, 2), (1,), ((8, 8), (4, 8)), ((2, 1),))
        assert [(c.batch, c.shortest) for c in found] == [(1, 8), (2, 8), (2, 4)]

    def test_refusals(self) -> None:
        with pytest.raises(InvalidArgument, match="larger batch"):
            all_cases((1,), (1,), ((4, 8),), ((2, 1),))
        with pytest.raises(InvalidArgument, match="do not hold 5"):
            all_cases((2,), (5,), ((4, 8),), ((2, 1),))

    def test_every_method_computes_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cases, "COLD_BYTES", 1)
        case = Case(2, 1, 2, 3, 5, 40)
        inputs = Inputs.of(case, torch.device("cpu"))
        outs = [cases.calls(case, inputs, method)[0]().float() for method in cases.TITLES]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=2e-2, atol=2e-2)


class TestReport:
    def test_goals(self) -> None:
        lines = report.goals(made())
        assert lines[0].startswith("32/8 heads, batch 8, keys 64..4096, 8 new: 77% of copy bandwidth (goal reached")
        assert "3.64x masked SDPA (goal reached" in lines[1]
        assert "at worst: 0.49" in lines[2]

    def test_missed_goals_say_so(self) -> None:
        slow = replace(made(), copy_bytes_per_second=5e12)
        assert "62% of copy bandwidth (goal missed" in report.goals(slow)[0]

    def test_tables(self) -> None:
        first, second = report.tables(made())
        assert first.title.startswith("32 query heads over 8")
        assert first.rows == (
            ("batch 8, keys 64..4096, 8 new", "68.2", "80.0 (21%)", "60.0 (28%)", "45.0 (38%)", *["22.0 (77%)"] * 2),
        )
        assert second.rows[0][0] == "batch 1, keys 512, 5 new"
        assert "Interrupted" in report.remarks(made(), complete=False)[-1]

    def test_trials(self) -> None:
        tried = tuple(Trial(GOAL, {"warps": w}, 4, (1e-5 * w,)) for w in (8, 2, 4))
        table = report.tables(replace(made(), trials=tried))[-1]
        assert [row[1] for row in table.rows] == ["2", "4", "8"]

    @pytest.mark.slow
    def test_stored_and_shown_again(self, tmp_path: Path) -> None:
        path, picture = tmp_path / "record.json", tmp_path / "picture.png"
        before = replace(made(), trials=(Trial(GOAL, {"warps": 4}, 4, (1e-5,)),))
        record = report.make_record(before, complete=True)
        record.save(path)
        assert load(path) == record
        shown = CliRunner().invoke(cli, ["bench", "show", str(path), "--plot", str(picture)])
        assert shown.exit_code == 0 and "masked SDPA" in shown.output
        assert picture.stat().st_size > 10_000


class TestRun:
    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The CPU for a GPU, and a clock that takes no time."""
        monkeypatch.setattr(kernels, "TRITON_DEVICES", {"cpu"})
        monkeypatch.setattr(cases, "COLD_BYTES", 1)
        monkeypatch.setattr(run, "need_gpu", lambda: torch.device("cpu"))
        monkeypatch.setattr(run, "copy_bandwidth", lambda device: 1e12)
        monkeypatch.setattr(run, "compile_all", lambda cases: None)
        monkeypatch.setattr(run, "replay_times", self.clock)
        monkeypatch.setattr(sweep, "replay_times", self.clock)

    @staticmethod
    def clock(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, ...]:
        return (1e-6 * len(calls),) * repeats

    def test_everything_is_measured_and_stored(self, tmp_path: Path) -> None:
        case = Case(2, 1, 2, 2, 5, 20)
        found = run.run([case], [case], 2, tmp_path / "r.json", Silent(), ["forerun"])
        assert [m["method"] for m in found.rows] == ["sdpa", "pad", "split", "keys", "auto"]
        assert found.rows[0]["deviation"] == 0 and all(m["deviation"] < 0.05 for m in found.rows)
        assert len(found.details["trials"]) == sweep.num_choices()
        assert load(tmp_path / "r.json") == found

    def test_an_interrupt_keeps_what_was_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, ...]:
            if len(stored) == 1:
                raise KeyboardInterrupt
            stored.append(1)
            return (1.0,)

        stored: list[int] = []
        monkeypatch.setattr(run, "replay_times", interrupted)
        case = Case(1, 1, 2, 1, 5, 9)
        found = run.run([case], [], 1, tmp_path / "r.json", Silent(), ["forerun"])
        assert not found.complete and len(found.rows) == 1

    def test_whatever_stops_it_every_case_that_ended_is_stored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, ...]:
            measured.append(1)
            if len(measured) > len(cases.TITLES) + 1:
                raise MemoryError
            return (1.0,)

        measured: list[int] = []
        monkeypatch.setattr(run, "replay_times", broken)
        first, second = Case(1, 1, 2, 1, 5, 9), Case(1, 1, 2, 2, 5, 9)
        with pytest.raises(MemoryError):
            run.run([first, second], [], 1, tmp_path / "r.json", Silent(), ["forerun"])
        found = load(tmp_path / "r.json")
        kept = [row for row in found.rows if Case(**row["case"]) == first]
        assert len(kept) == len(cases.TITLES) and not found.complete

    def test_without_triton(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "TRITON_DEVICES", set())
        with pytest.raises(ForerunError, match="nothing to measure"):
            run.run([EQUAL], [], 1, tmp_path / "r.json", Silent(), ["forerun"])


class TestCompiling:
    def test_no_two_groups_share_a_kernel(self) -> None:
        asked = all_cases((8, 1, 16), (8, 1), cases.LENGTHS, cases.HEADS)
        found = compiling.kernel_groups(asked)
        assert len(found) == 2 * 2 * 4, "heads, new tokens; PAD, SPLIT, chunks, shares"
        assert {(method, case) for method, alike in found for case in alike} == {
            (str(method), case) for method in (Form.PAD, Form.SPLIT, Form.KEYS) for case in asked
        }

    def test_parts_make_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[tuple[str, Case]] = []

        def noted(case: Case, inputs: Inputs, method: str) -> list[Callable[[], object]]:
            return [lambda: called.append((method, case))]

        monkeypatch.setattr(compiling, "need_gpu", lambda: torch.device("cpu"))
        monkeypatch.setattr(compiling, "calls", noted)
        asked = all_cases((1, 2), (1, 2), ((8, 8), (4, 8)), ((2, 1),))
        for part in range(3):
            compiling.compile_some(part, 3, [astuple(case) for case in asked])
        assert len(called) == len(set(called)) == 3 * len(asked)

    def test_processes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        body = "from pathlib import Path\ndef note(part, parts, word, pairs):\n"
        (tmp_path / "noting.py").write_text(body + "    (Path(word) / f'{part} of {parts}').write_text(str(pairs))\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        compile_apart("noting", "note", str(tmp_path), [(1, 2)])
        assert {p.name: p.read_text() for p in tmp_path.glob("* of *")} == dict.fromkeys(
            ("0 of 2", "1 of 2"), "[(1, 2)]"
        )


class TestCommand:
    def test_what_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        asked: list[int] = []

        def fake(cases: Sequence[Case], swept: Sequence[Case], *_: object) -> Record:
            asked.extend((len(cases), len(swept)))
            return report.make_record(made(), complete=True)

        monkeypatch.setattr(plain, "run", fake)
        monkeypatch.setattr(plain, "need_gpu", lambda: torch.device("cpu"))
        assert plain.command(["--sweep", "--output", str(tmp_path / "r.json")]) == 0
        assert asked == [48, 2]
        assert "32 query heads over 8" in capsys.readouterr().out

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(lambda: plain.command([])) == 2
        assert "CUDA GPU" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "wrong", [["--lengths", "9..4"], ["--lengths", "a"], ["--heads", "32"], ["--heads", "5/2"], ["--tokens", "0"]]
    )
    def test_wrong_options(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            plain.option_parser().parse_args(wrong)
