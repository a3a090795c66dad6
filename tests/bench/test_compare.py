"""Turns, interruptions, and the whole of it on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import forerun.loading
from forerun import NgramTable, PromptLookup
from forerun.bench.compare import run
from forerun.bench.methods import BASELINE, METHODS, Bench, check_methods, default_methods, same_law
from forerun.bench.prompts import built_in
from forerun.bench.report import make_record
from forerun.bench.settings import CompareSettings
from forerun.cli.main import INTERRUPTED, cli
from forerun.errors import InvalidArgument
from forerun.measure.record import Record, load
from support.bench import FakeMethod, Notebook, WordTokenizer, measurement, results_of
from support.tiny import draft_of, plain_greedy, tiny_model

DIARY = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_DATA", raising=False)
    monkeypatch.delenv("FORERUN_TEST_DATA", raising=False)


@pytest.fixture
def bench() -> Bench:
    return Bench(tiny_model("llama"), WordTokenizer(), temperature=0.0, seed=0)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "r.json"


def fake_run(bench: Bench, methods: list[FakeMethod], output: Path, **more: Any) -> tuple[Record, Notebook]:
    chosen: dict[str, Any] = {"batch_sizes": (1, 2), "categories": ("qa", "rag"), "prompts_per_category": 1}
    settings = CompareSettings(methods=tuple(m.name for m in methods), max_new_tokens=5, **chosen | more)
    notebook = Notebook()
    return run(settings, bench, built_in(), output, notebook, methods), notebook


def test_methods_take_turns_on_every_group(bench: Bench, output: Path) -> None:
    diary: DIARY = []
    methods = [FakeMethod("a", diary), FakeMethod("b", diary, single=True), FakeMethod("c", diary)]
    record, notebook = fake_run(bench, methods, output, repeats=2)
    one, two = [("a", 1), ("b", 1), ("c", 1)], [("a", 2), ("c", 2)]
    back, pair = one[::-1], two[::-1]  # the second time whoever was last comes first
    measured = one + one + two + two + back + back + pair + pair
    warm_ups = len(diary) - len(measured)
    assert diary[warm_ups:] == measured
    assert set(diary[:warm_ups]) == {*one, *two}
    assert [(m["method"], m["batch"]) for m in record.rows] == measured
    assert [m["category"] for m in record.rows[:6]] == ["qa"] * 3 + ["rag"] * 3
    assert [(r["method"], r["batch"]) for r in record.details["refusals"]] == [("b", 2)]
    assert record.complete and load(output) == record
    assert notebook.done == pytest.approx(notebook.total) and "minutes" in notebook.said[0]


def test_an_output_that_fills_the_context_is_refused(bench: Bench, output: Path) -> None:
    context = bench.target.config.max_position_embeddings
    settings = CompareSettings(methods=("a",), batch_sizes=(1,), max_new_tokens=context)
    diary: DIARY = []
    with pytest.raises(InvalidArgument, match=rf"--max-new-tokens {context}: the target's context ends at {context}"):
        run(settings, bench, built_in(), output, Notebook(), [FakeMethod("a", diary)])
    assert not diary


def test_the_context_ends_where_decoding_does(output: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    target = tiny_model("llama", rope_parameters=rope)
    assert target.config.max_position_embeddings > 32
    settings = CompareSettings(methods=("a",), batch_sizes=(1,), max_new_tokens=32)
    with pytest.raises(InvalidArgument, match="context ends at 32"):
        run(settings, Bench(target, WordTokenizer(), 0.0, 0), built_in(), output, Notebook(), [FakeMethod("a", [])])


def test_the_baseline_is_compared_with_nobody(bench: Bench, output: Path) -> None:
    record, _ = fake_run(bench, [FakeMethod("a", []), FakeMethod("b", [])], output)
    agreements = {m["method"]: m["agreement"] for m in record.rows if m["batch"] == 2}
    assert agreements["a"] is None
    assert agreements["b"] == {"identical": 2, "ties": 0, "different": 0}


def test_sampled_text_is_not_compared(bench: Bench, output: Path) -> None:
    record, _ = fake_run(bench, [FakeMethod("a", []), FakeMethod("b", [])], output, temperature=1.0)
    assert {m["agreement"] for m in record.rows} == {None}


def interrupting(after: int, error: BaseException) -> Iterator[None]:
    for _ in range(after):
        yield
    raise error


def test_control_c_keeps_what_was_measured(bench: Bench, output: Path) -> None:
    calls = interrupting(3, KeyboardInterrupt())  # two warm-ups and the first group pass, the second group does not
    diary: DIARY = []
    methods = [FakeMethod("a", diary), FakeMethod("b", diary, before=lambda: next(calls))]
    record, _ = fake_run(bench, methods, output)
    assert not record.complete and load(output) == record
    assert [(m["method"], m["category"]) for m in record.rows] == [("a", "qa"), ("b", "qa"), ("a", "rag")]


def test_a_failure_keeps_what_was_measured_and_is_raised(bench: Bench, output: Path) -> None:
    calls = interrupting(3, RuntimeError("out of memory"))
    methods = [FakeMethod("a", []), FakeMethod("b", [], before=lambda: next(calls))]
    with pytest.raises(RuntimeError, match="out of memory"):
        fake_run(bench, methods, output)
    saved = load(output)
    assert not saved.complete and [m["method"] for m in saved.rows] == ["a", "b", "a"]


def test_control_c_while_warming_up_saves_nothing(bench: Bench, output: Path) -> None:
    calls = interrupting(0, KeyboardInterrupt())
    record, _ = fake_run(bench, [FakeMethod("a", [], before=lambda: next(calls))], output)
    assert not record.complete and not record.rows and not output.exists()


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"temperature": -1.0}]
)
def test_settings_answer_back(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        CompareSettings(methods=(BASELINE,), **wrong)


def test_methods_are_checked_and_the_baseline_is_always_there() -> None:
    assert check_methods(["forerun", "lookup"], None) == (BASELINE, "lookup", "forerun")
    assert set(default_methods("small")) - set(default_methods(None)) == {"assisted", "forerun-draft"}
    for drafter in ("self:8", "lookup,small", "shared:small", "bench.test_compare:Mine"):
        assert set(default_methods(drafter)) - set(default_methods(None)) == {"forerun-draft"}
        with pytest.raises(InvalidArgument, match=f"needs a draft model, which '{drafter}' is not"):
            check_methods(["assisted"], drafter)
    with pytest.raises(InvalidArgument, match="forerun-plain"):
        check_methods(["vllm"], "small")
    with pytest.raises(InvalidArgument, match="--draft"):
        check_methods(["assisted"], None)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_emits_what_was_asked_for(temperature: float) -> None:
    """The target has an end token in its configuration and would stop at once; all methods must ignore it."""
    target = draft_of(tiny_model("llama"), noise=0.0)
    draft = draft_of(target)
    prompts = [[5, 6, 7, 5, 6], [8, 9]]
    expected = [plain_greedy(target, prompt, 6) for prompt in prompts]
    for model in (target, draft):
        model.generation_config.eos_token_id = [expected[0][0], expected[1][0]]
    bench = Bench(target, WordTokenizer(), temperature, 0, draft)
    with same_law(target, draft):
        for make in METHODS.values():
            method = make(bench)
            rows = 1 if method.refusal(2) else 2
            done = method.run(prompts[:rows], 6)
            assert [len(row) for row in done.tokens] == [6] * rows, method.name
            assert done.seconds > 0 and rows <= done.rounds <= 6 * rows, method.name
            if temperature == 0:
                assert [list(row) for row in done.tokens] == expected[:rows], method.name
    assert target.generation_config.eos_token_id == [expected[0][0], expected[1][0]]


def test_transformers_still_refuses_batches() -> None:
    """If this fails, transformers has learnt it, and the table should no longer say that it refuses."""
    bench = Bench(tiny_model("llama"), WordTokenizer(), 0.0, 0, tiny_model("llama", 1))
    with same_law(bench.target, bench.draft):
        for name in ("lookup", "assisted"):
            method = METHODS[name](bench)
            assert method.refusal(1) is None and method.refusal(2)
            with pytest.raises(ValueError, match="batch"):
                method.run([[1, 2], [3, 4]], 4)


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


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_loader")
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    result = bench_command(*SHORT, "--draft", "small", "--output", str(output))
    assert result.exit_code == 0, result.output
    for words in ("Forerun draft model", "refuses", "geometric mean", "own 48 prompts", "minutes", "r.json"):
        assert words in result.output
    record = load(output)
    assert record.complete and len(record.rows) == 2 * 7 + 2 * 5
    found = [m["agreement"] for m in record.rows if m["agreement"] is not None]
    assert len(found) == 2 * 6 + 2 * 4 and not any(a["different"] for a in found)

    again = bench_command("show", str(output))
    assert again.exit_code == 0 and again.stdout == result.stdout


class Mine(PromptLookup):
    """A user's own."""


@pytest.mark.quick("folder", "auto", "bench.test_compare:Mine")
@pytest.mark.usefixtures("tiny_loader")
@pytest.mark.parametrize("drafter", ("self:8", "lookup,small", "auto", "bench.test_compare:Mine", "folder"))
def test_any_drafter_may_be_measured(tmp_path: Path, drafter: str) -> None:
    if drafter == "folder":
        vocab = tiny_model("llama").config.vocab_size
        NgramTable.count([[1, 2, 3]] * 9, vocab_size=vocab).save(tmp_path / "table.safetensors")
        drafter = f"lookup,ngram:{tmp_path / 'table.safetensors'}"
    asked = ("--batch-sizes", "1", "--categories", "qa", "--methods", "forerun-draft", "--draft", drafter)
    result = bench_command(*SHORT, *asked, "--output", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    record, shown = load(tmp_path / "r.json"), drafter.replace(f"{tmp_path}/", "")
    assert record.settings["draft"] == shown and str(tmp_path) not in (tmp_path / "r.json").read_text()
    assert record.details["titles"] == {"generate": "model.generate", "forerun-draft": f"Forerun {shown}"}
    assert [row["agreement"]["different"] for row in record.rows if row["agreement"] is not None] == [0]


@pytest.mark.usefixtures("tiny_loader")
def test_control_c_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = interrupting(2, KeyboardInterrupt())
    names = (BASELINE, "forerun")
    for name in names:
        before = (lambda: next(calls)) if name == "forerun" else (lambda: None)
        monkeypatch.setitem(METHODS, name, lambda bench, n=name, b=before: FakeMethod(n, [], before=b))
    output = tmp_path / "r.json"
    result = bench_command(*SHORT[:-2], "--batch-sizes", "1", "--methods", "forerun", "--output", str(output))
    assert result.exit_code == INTERRUPTED, result.output
    assert "Interrupted" in result.stdout
    assert [m["method"] for m in load(output).rows] == [BASELINE, "forerun", BASELINE]


@pytest.mark.usefixtures("tiny_loader")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "assisted"], "--draft"),
        (["--methods", "assisted", "--draft", "self:8"], "needs a draft model"),
        (["--methods", "forerun-draft", "--draft", "off"], "give one with --draft"),
        (["--draft", "self:7"], "self:8 or self:4"),
        (["--draft", "lokup"], "did you mean 'lookup'"),
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
    results = results_of([measurement(m, 1, "qa", 0, 1.0) for m in (BASELINE, "forerun")])
    make_record(results, complete=True).save(tmp_path / "r.json")
    result = bench_command("show", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.svg"))
    assert result.exit_code == 0 and (tmp_path / "p.svg").exists()
