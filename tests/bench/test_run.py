"""Turns, interruptions, and the whole of it on tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import forerun.loading
from bench.fakes import FakeContender, Notebook, WordTokenizer, measurement, record_of
from forerun.bench import __main__ as plain_main
from forerun.bench import job, records
from forerun.bench.methods import BASELINE, CONTENDERS, Bench, check_methods, default_methods, same_law
from forerun.bench.prompts import built_in
from forerun.bench.records import Record
from forerun.bench.run import Settings, run
from forerun.cli.main import INTERRUPTED, cli
from forerun.errors import InvalidArgument
from support.imports import asked_for_by_forerun
from support.tiny import draft_of, plain_greedy, tiny_model

DIARY = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_DATA", raising=False)
    monkeypatch.delenv("FORERUN_TEST_DATA", raising=False)


@pytest.fixture
def bench() -> Bench:
    return Bench(tiny_model("llama"), WordTokenizer(), temperature=0.0, seed=0)


def fake_run(
    bench: Bench, contenders: list[FakeContender], saved: list[Record], **more: Any
) -> tuple[Record, Notebook]:
    chosen: dict[str, Any] = {"batch_sizes": (1, 2), "categories": ("qa", "rag"), "prompts_per_category": 1}
    settings = Settings(methods=tuple(c.name for c in contenders), max_new_tokens=5, **chosen | more)
    notebook = Notebook()
    record = run(settings, bench, built_in(), notebook, saved.append, ["forerun", "bench"], contenders)
    return record, notebook


def test_contenders_take_turns_on_every_group(bench: Bench) -> None:
    diary: DIARY = []
    contenders = [FakeContender("a", diary), FakeContender("b", diary, single=True), FakeContender("c", diary)]
    saved: list[Record] = []
    record, notebook = fake_run(bench, contenders, saved, repeats=2)
    one, two = [("a", 1), ("b", 1), ("c", 1)], [("a", 2), ("c", 2)]
    measured = (one + one + two + two) * 2
    warm_ups = len(diary) - len(measured)
    assert diary[warm_ups:] == measured
    assert set(diary[:warm_ups]) == {*one, *two}
    assert [(m.method, m.batch) for m in record.measurements] == measured
    assert [m.category for m in record.measurements[:6]] == ["qa"] * 3 + ["rag"] * 3
    assert [(r.method, r.batch) for r in record.refusals] == [("b", 2)]
    assert record.complete and saved == [record]
    assert notebook.expected == pytest.approx(notebook.plans[0].total_seconds)


def test_the_baseline_is_compared_with_nobody(bench: Bench) -> None:
    record, _ = fake_run(bench, [FakeContender("a", []), FakeContender("b", [])], [])
    agreements = {m.method: m.agreement for m in record.measurements if m.batch == 2}
    assert agreements["a"] is None
    assert agreements["b"] == records.Agreement(identical=2, ties=0, different=0)


def test_sampled_text_is_not_compared(bench: Bench) -> None:
    record, _ = fake_run(bench, [FakeContender("a", []), FakeContender("b", [])], [], temperature=1.0)
    assert {m.agreement for m in record.measurements} == {None}


def interrupting(after: int, error: BaseException) -> Iterator[None]:
    for _ in range(after):
        yield
    raise error


def test_control_c_keeps_what_was_measured(bench: Bench) -> None:
    calls = interrupting(3, KeyboardInterrupt())  # two warm-ups and the first group pass, the second group does not
    diary: DIARY = []
    contenders = [FakeContender("a", diary), FakeContender("b", diary, before=lambda: next(calls))]
    saved: list[Record] = []
    record, _ = fake_run(bench, contenders, saved)
    assert not record.complete and saved == [record]
    assert [(m.method, m.category) for m in record.measurements] == [("a", "qa"), ("b", "qa"), ("a", "rag")]


def test_a_failure_keeps_what_was_measured_and_is_raised(bench: Bench) -> None:
    calls = interrupting(3, RuntimeError("out of memory"))
    contenders = [FakeContender("a", []), FakeContender("b", [], before=lambda: next(calls))]
    saved: list[Record] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        fake_run(bench, contenders, saved)
    assert not saved[0].complete and [m.method for m in saved[0].measurements] == ["a", "b", "a"]


def test_control_c_while_warming_up_saves_nothing(bench: Bench) -> None:
    calls = interrupting(0, KeyboardInterrupt())
    saved: list[Record] = []
    record, _ = fake_run(bench, [FakeContender("a", [], before=lambda: next(calls))], saved)
    assert not record.complete and not record.measurements and not saved


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"temperature": -1.0}]
)
def test_settings_answer_back(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Settings(methods=(BASELINE,), **wrong)


def test_methods_are_checked_and_the_baseline_is_always_there() -> None:
    assert check_methods(["forerun", "lookup"], has_draft=False) == (BASELINE, "lookup", "forerun")
    assert set(default_methods(True)) - set(default_methods(False)) == {"assisted", "forerun-draft"}
    with pytest.raises(InvalidArgument, match="forerun-plain"):
        check_methods(["vllm"], has_draft=True)
    with pytest.raises(InvalidArgument, match="--draft"):
        check_methods(["assisted"], has_draft=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_contender_emits_what_was_asked_for(temperature: float) -> None:
    """The target has an end token in its configuration and would stop at once; all contenders must ignore it."""
    target = draft_of(tiny_model("llama"), noise=0.0)
    draft = draft_of(target)
    prompts = [[5, 6, 7, 5, 6], [8, 9]]
    expected = [plain_greedy(target, prompt, 6) for prompt in prompts]
    for model in (target, draft):
        model.generation_config.eos_token_id = [expected[0][0], expected[1][0]]
    bench = Bench(target, WordTokenizer(), temperature, 0, draft)
    with same_law(target, draft):
        for make in CONTENDERS.values():
            contender = make(bench)
            rows = 1 if contender.refusal(2) else 2
            done = contender.run(prompts[:rows], 6)
            assert [len(row) for row in done.tokens] == [6] * rows, contender.name
            assert done.seconds > 0 and rows <= done.rounds <= 6 * rows, contender.name
            if temperature == 0:
                assert [list(row) for row in done.tokens] == expected[:rows], contender.name
    assert target.generation_config.eos_token_id == [expected[0][0], expected[1][0]]


def test_transformers_still_refuses_batches() -> None:
    """If this fails, transformers has learnt it, and the table should no longer say that it refuses."""
    bench = Bench(tiny_model("llama"), WordTokenizer(), 0.0, 0, tiny_model("llama", 1))
    with same_law(bench.target, bench.draft):
        for name in ("lookup", "assisted"):
            contender = CONTENDERS[name](bench)
            assert contender.refusal(1) is None and contender.refusal(2)
            with pytest.raises(ValueError, match="batch"):
                contender.run([[1, 2], [3, 4]], 4)


@pytest.fixture
def tiny_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"embedded": tiny_model("llama"), "small": draft_of(tiny_model("llama"))}
    monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: (models[name], WordTokenizer()))


def bench_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments], env={"COLUMNS": "200"})


SHORT = (
    "--max-new-tokens",
    "8",
    "--prompts-per-category",
    "1",
    "--batch-sizes",
    "1,2",
    "--categories",
    "qa,summarization",
)


@pytest.mark.usefixtures("tiny_loader")
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    result = bench_command(*SHORT, "--draft", "small", "--output", str(output))
    assert result.exit_code == 0, result.output
    for words in ("Forerun draft model", "refuses", "geometric mean", "own 48 prompts", "minutes", "r.json"):
        assert words in result.output
    record = records.read(output)
    assert record.complete and len(record.measurements) == 2 * 7 + 2 * 5
    found = [m.agreement for m in record.measurements if m.agreement is not None]
    assert len(found) == 2 * 6 + 2 * 4 and not any(a.different for a in found)
    assert set(json.loads(output.read_text())["summary"]) == {"1", "2"}

    again = bench_command("show", str(output))
    assert again.exit_code == 0 and again.stdout == result.stdout


@pytest.mark.usefixtures("tiny_loader")
def test_control_c_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = interrupting(2, KeyboardInterrupt())
    names = (BASELINE, "forerun")
    for name in names:
        before = (lambda: next(calls)) if name == "forerun" else (lambda: None)
        monkeypatch.setitem(CONTENDERS, name, lambda bench, n=name, b=before: FakeContender(n, [], before=b))
    output = tmp_path / "r.json"
    result = bench_command(*SHORT[:-2], "--batch-sizes", "1", "--methods", "forerun", "--output", str(output))
    assert result.exit_code == INTERRUPTED, result.output
    assert "Interrupted" in result.stdout
    assert [m.method for m in records.read(output).measurements] == [BASELINE, "forerun", BASELINE]


@pytest.mark.usefixtures("tiny_loader")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "assisted"], "--draft"),
        (["--methods", "vllm"], "forerun-plain"),
        (["--categories", "poetry"], "translation"),
        (["--batch-sizes", "1,x"], "1,4,8"),
        (["--quick", "show", "r.json"], "--quick"),
        (["--plot", "p.bmp"], ".png"),
        (["show", "no-such-record.json"], "cannot read"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(arguments: list[str], message: str) -> None:
    result = bench_command(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_show_draws_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records.write(record_of([measurement(m, 1, "qa", 0, 1.0) for m in (BASELINE, "forerun")]), tmp_path / "r.json")
    result = bench_command("show", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.svg"))
    assert result.exit_code == 0 and (tmp_path / "p.svg").exists()


@pytest.mark.usefixtures("tiny_loader")
def test_python_dash_m(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(job.QUICK, "max_new_tokens", 8)
    assert plain_main.main(["--quick", "--output", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr()
    assert "geometric mean" in shown.out and "own 48 prompts" in shown.err
    assert records.read(tmp_path / "r.json").provenance.command.startswith("python -m forerun.bench --quick")


@pytest.mark.slow
def test_python_dash_m_needs_neither_click_nor_rich() -> None:
    asked = asked_for_by_forerun("import forerun.bench.__main__")
    assert {"forerun", "argparse"} <= asked and not {"click", "rich", "matplotlib"} & asked
