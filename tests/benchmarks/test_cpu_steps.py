"""`python -m benchmarks.cpu_steps`: steps that leave no trace, floors by hand, turns, the record and its tables."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import forerun.loading
from benchmarks.cpu_steps import __main__ as program
from benchmarks.cpu_steps import expected, report, run, steps
from benchmarks.cpu_steps.results import CpuResults, StepTimes, least_seconds
from benchmarks.cpu_steps.steps import Forerun, Grid, Inputs, Subject, Transformers
from forerun import kernels
from forerun.bench import hardware
from forerun.bench.hardware import Ceilings, Work, measure_ceilings, work_of
from forerun.cli.main import cli
from forerun.config import Kernels
from forerun.measure import provenance
from forerun.measure.record import load
from forerun.measure.show import INTERRUPTED, MISTAKEN, main
from support.bench import ORIGIN
from support.heads import head_of
from support.tiny import draft_of, tiny_model

needs_kernels = pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here")
GRID = Grid(batches=(1, 3), tokens=(1, 2), past=9, repeats=2)
CEILINGS = Ceilings(copy=None, linear=1000.0, operations=10_000.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores_of_others", lambda: 0.0)
    monkeypatch.setattr(run, "measure_ceilings", lambda device, dtype: CEILINGS)


def subject(name: str = "target") -> Subject:
    return Subject(name, tiny_model("llama"))


class TestSteps:
    @pytest.mark.quick("off")
    @pytest.mark.parametrize("use", [Kernels.OFF, Kernels.ON])
    def test_forerun_leaves_the_rows_as_they_were(self, use: Kernels) -> None:
        method = Forerun(subject(), Inputs(subject(), GRID), use)
        for tokens in (2, 1):
            assert method.step(3, tokens) > 0
            assert [method.scorer.length(row) for row in range(3)] == [9, 9, 9]

    def test_transformers_cache_is_cut_back(self) -> None:
        method = Transformers(subject(), Inputs(subject(), GRID))
        for tokens in (2, 1):
            assert method.step(3, tokens) > 0
            assert method._caches[3].get_seq_length() == 9

    def test_new_tokens_are_scored_however_many(self) -> None:
        """As many as there are keys, too: a step must not be taken for the filling of the cache."""
        grid = Grid(batches=(1,), tokens=(4,), past=4, repeats=1)
        method = Forerun(subject(), Inputs(subject(), grid), Kernels.OFF)
        scored: list[Any] = []
        real = method.scorer.score
        method.scorer.score = lambda *a: scored.append(real(*a)) or scored[-1]  # type: ignore[method-assign,func-returns-value]
        method.step(1, 4)
        assert [len(logits) for logits in scored] == [4]

    def test_prompts_have_no_keys_before_and_one_logit_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        grid = Grid(batches=(1, 3), tokens=(4,), past=0, repeats=1, last_only=True)
        run.check_grid(grid, 8)
        ours = Forerun(subject(), Inputs(subject(), grid), Kernels.OFF)
        theirs = Transformers(subject(), Inputs(subject(), grid))
        sizes: list[tuple[int, ...]] = []
        for method in (ours.scorer, theirs):
            name = "score_last" if method is ours.scorer else "_run"
            real = getattr(method, name)

            def kept(*call: Any, real: Any = real) -> Any:
                found = real(*call)
                sizes.append(tuple(getattr(found, "logits", found).shape))
                return found

            monkeypatch.setattr(method, name, kept)
        for _ in range(2):  # the second time nothing of the first is left
            ours.step(3, 4)
            theirs.step(3, 4)
            assert ours.scorer.length(0) == 0 and theirs._caches[3].get_seq_length() == 0
        assert sizes == [(3, 97), (3, 1, 97)] * 2

    def test_a_body_without_tokens(self) -> None:
        body = Subject("body", head_of(tiny_model("llama")).body, headless=True)
        for method in steps.methods(body, GRID, Kernels.OFF).values():
            assert method.step(3, 2) > 0

    def test_methods_take_turns(self) -> None:
        diary: list[tuple[str, int, int]] = []

        class Fake:
            def __init__(self, name: str) -> None:
                self.name = name

            def step(self, batch: int, tokens: int) -> float:
                diary.append((self.name, batch, tokens))
                return float(len(diary))

        kept: list[tuple[str, int, int, float]] = []
        fakes = {name: Fake(name) for name in "ab"}
        steps.sweep(fakes, Grid((1, 2), (1,)), lambda *step: kept.append(step))
        assert diary == [(n, b, 1) for b in (1, 2) for n in "ab" for _ in range(2)]
        assert [step[-1] for step in kept] == [2, 4, 6, 8], "the first of two calls wakes the threads"


class TestFloors:
    def test_reading_or_calculating_whichever_takes_longer(self) -> None:
        work = Work(weight_bytes=5000, operations_per_token=1000, bytes_per_key=10, operations_per_key=2)
        assert least_seconds(work, CEILINGS, 1, 1, 9) == pytest.approx((5000 + 10 * 10) / 1000)
        # eight rows of eight tokens: 64 000 operations by weights, and 10 + 11 + .. + 17 keys a row in attention
        assert least_seconds(work, CEILINGS, 8, 8, 9) == pytest.approx((64_000 + 8 * 108 * 2) / 10_000)

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

    @pytest.mark.slow
    def test_real_ceilings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hardware, "_buffer_bytes", lambda: 16 << 20)
        ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
        assert ceilings.linear > 1e8 and ceilings.operations > 1e8

    def test_the_buffer_is_larger_than_the_last_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hardware, "LAST_CACHE", tmp_path / "size")
        assert hardware._last_cache() == 0
        (tmp_path / "size").write_text("98304K\n")
        assert hardware._last_cache() == 96 << 20
        assert hardware._buffer_bytes() > 4 * (96 << 20)


def made(seconds_of: dict[str, float], **more: Any) -> CpuResults:
    """Every step costs its method's seconds a position, the first position twice as much."""
    timed = tuple(
        StepTimes("target", method, batch, tokens, (seconds * (1 + batch * tokens), seconds * (2 + batch * tokens)))
        for method, seconds in seconds_of.items()
        for batch in GRID.batches
        for tokens in GRID.tokens
    )
    settings = {"model": "m", "past": 9, "repeats": 2}
    return CpuResults(
        **{
            "provenance": ORIGIN,
            "settings": settings,
            "titles": {method: method.upper() for method in seconds_of},
            "ceilings": CEILINGS,
            "work": {"target": Work(5, 10, 1, 2)},
            "steps": timed,
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
        few = made({}, titles=found.titles, steps=tuple(m for m in found.steps if m.batch == 3))
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
            learnt = expected.costs(made({"kernels": 1.0}, steps=tuple(own)), "target", "kernels")
            return [expected.draft_length(learnt, 1, a, 0.0) for a in (0.5, 0.9)]

        few, many = lengths(lambda t: 1 + 0.02 * t)
        assert 2 <= few < many
        assert lengths(lambda t: float(t)) == [0, 0]
        flat = made({"kernels": 1.0}, steps=(StepTimes("target", "kernels", 1, 1, (1.0,)),))
        learnt = expected.costs(flat, "target", "kernels")
        assert expected.draft_length(learnt, 1, 0.9, 5.0) == 0, "a draft dearer than the target never pays"

    def test_remarks(self) -> None:
        text = "\n".join(report.remarks(made({"transformers": 0.1}, notes=("noisy",)), complete=False))
        assert "Note: noisy." in text and "Interrupted" in text and "A chip, 2 threads" in text


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    record = report.make_record(made({"transformers": 0.1, "kernels": 0.05}), complete=True)
    record.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model and a draft, both tiny."""
    target = copy.deepcopy(tiny_model("llama"))
    known = {"embedded": target, "small": draft_of(target)}
    monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: (known[name], None))


def cpu_steps(*arguments: str) -> int:
    small = ["--batch-sizes", "1", "3", "--tokens", "1", "2", "--past", "9", "--repeats", "2"]
    return main(lambda: program.command([*small, *arguments]))


@pytest.mark.slow
@needs_kernels
@pytest.mark.usefixtures("models")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output, picture = tmp_path / "cpu.json", tmp_path / "cpu.png"
    assert cpu_steps("--draft", "small", "--kernels", "on", "--output", str(output), "--plot", str(picture)) == 0
    shown = capsys.readouterr().out
    for words in ("Target, batch 3", "Draft, batch 1", "Forerun, kernels on", "auto expects", "batch 3, draft"):
        assert words in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = load(output)
    assert found.complete and len(found.rows) == 2 * 3 * 2 * 2
    assert all(len(m["seconds"]) == 2 for m in found.rows)
    assert found.settings["kernels"] == "on" and found.provenance.machine.device == "cpu"
    again = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["bench", "show", str(output)])
    assert again.stdout == shown


@pytest.mark.usefixtures("models")
def test_without_kernels_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "why_not_numba", lambda: "No module named 'numba'; pip install numba")
    assert cpu_steps("--kernels", "auto", "--output", str(tmp_path / "cpu.json")) == 0
    assert "no kernels were measured (No module named 'numba'; pip install numba)" in capsys.readouterr().out
    assert list(load(tmp_path / "cpu.json").details["titles"]) == ["transformers", "modules"]


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
    assert cpu_steps("--kernels", "off", "--output", str(tmp_path / "cpu.json")) == INTERRUPTED
    found = load(tmp_path / "cpu.json")
    assert not found.complete and {len(m["seconds"]) for m in found.rows} == {1}


@pytest.mark.usefixtures("models")
def test_too_many_keys_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_steps("--past", "511", "--output", str(tmp_path / "cpu.json")) == MISTAKEN
    assert "511 keys and 2 new tokens do not fit the context of 512" in capsys.readouterr().err
