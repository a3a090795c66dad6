"""The commands, end to end, on a target as a user would have it."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

import forerun.cli.run
import forerun.loading
import forerun.train.loop
from forerun.cli import train_data
from forerun.cli.main import INTERRUPTED, cli
from forerun.loading.drafter_folder import load_drafter
from forerun.measure.record import load
from forerun.train import evaluate, report
from forerun.train.loop import train_draft
from forerun.train.options import KINDS, WritingSettings
from forerun.train.processes import Processes
from forerun.train.report import read_run
from forerun.train.shards import Manifest, Shards, ShardWriter, TrainingText
from support.folders import VOCAB, byte_tokenizer, save
from support.tiny import tiny_model
from train.texts import markov_target, memory, small, written_by

TRAIN = ("--steps", "4", "--batch-tokens", "512", "--max-length", "64", "--hold-out", "6", "--evaluate-every", "2",
         "--learning-rate", "0.02", "--device", "cpu", "--offline")  # fmt: skip


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "2"), "--heads: a feature draft has none"),
        (("--kind", "causal", "--unroll", "2"), "--unroll: a causal draft is not unrolled"),
        (("--num-layers", "2", "--layers", "0,1"), "--num-layers: --layers, --from or --config says how many"),
        (("--rollout-length", "4"), "--rollout-length: --rollout-share is 0"),
        (("--data", "data", "--prompts", __file__), "--prompts: --data holds what is learnt from"),
        (("--limit", "2"), "--limit: it bounds the prompts of --evaluate"),
    ],
)
def test_an_option_that_nobody_would_look_at_is_refused(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    refused = invoke("train", "draft", "no/such/target", "-o", tmp_path / "made", *arguments)
    assert refused.exit_code == 2
    assert words in " ".join(refused.stderr.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its data and some prompts."""
    folder = tmp_path_factory.mktemp("training")
    model = markov_target(VOCAB)
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    entry = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB}
    writer = ShardWriter(folder / "data", Manifest(entry, 0, {}))
    for i, row in enumerate(written_by(model, 60, 32, first=5)):
        writer.add(i, TrainingText(row, 2))
    writer.flush()
    rows = [{"category": "ab"[i % 2], "turns": [f"Question {i}"]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def brief_timing() -> Iterator[None]:
    """Costs are measured as ever, in few rounds: no test looks at how precise they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "REPEATS", 1)
        yield


@pytest.fixture(scope="module")
def runs(place: Path, brief_timing: None) -> dict[str, Path]:
    """One run of two kinds, the first evaluated at its end."""
    found = {}
    for kind in ("feature", "causal"):
        found[kind] = place / kind
        more = ("--kind", kind, "--draft-vocabulary", "100", "--loss", "tv+kl")
        more += ("--unroll", "2") if kind == "feature" else ()
        judged = ("--evaluate", place / "prompts.jsonl") if kind == "feature" else ()
        source = ("--data", place / "data", "-o", found[kind])
        result = invoke("train", "draft", place / "target", *source, *more, *judged, *TRAIN)
        assert result.exit_code == 0, result.output
        assert "held out" in result.stderr and "of a target step" in result.stderr
    return found


@pytest.mark.slow
def test_a_run_leaves_drafter_diary_and_curves(runs: dict[str, Path]) -> None:
    names = {path.name for path in runs["feature"].iterdir()}
    assert {"forerun.json", "model.safetensors", "train.jsonl", "checkpoint.pt", "eval.json"} <= names
    if importlib.util.find_spec("matplotlib") is not None:
        assert {"loss.png", "acceptance.png"} <= names
    provenance = load_drafter(runs["feature"])[0].provenance
    assert {"commit", "versions", "command", "options", "data", "steps"} <= provenance.keys()


@pytest.mark.slow
def test_the_evaluation_tells_categories_costs_and_verdict(runs: dict[str, Path]) -> None:
    record = load(runs["feature"] / "eval.json", "train eval")
    greedy, *categories = (row for row in record.rows if row["temperature"] == 0)
    assert greedy["category"] == "all" and [row["category"] for row in categories] == ["a", "b"]
    assert greedy["tokens"] == sum(row["tokens"] for row in categories)
    assert greedy["tokens_per_round"] == pytest.approx(greedy["tokens"] / greedy["rounds"])
    assert len(greedy["acceptance_by_position"]) == 4
    assert 0 <= greedy["repeated_4grams"] <= 1
    assert all(ratio > 0 for ratio in record.details["costs"]["draft_ratio"].values())
    assert "pay" in record.details["verdict"]["text"]
    assert record.headline == (record.details["verdict"]["text"],)
    assert [len(table.rows) for table in record.tables] == [3, 3]  # two categories and all, at two temperatures


@pytest.mark.slow
def test_runs_are_compared(place: Path, runs: dict[str, Path]) -> None:
    pytest.importorskip("matplotlib")
    missing = invoke("train", "compare", runs["feature"], runs["causal"])
    assert missing.exit_code == 2 and "forerun train eval" in missing.stderr
    more = ("--prompts", place / "prompts.jsonl", "--max-new-tokens", "12", "--timed", "0", "--device", "cpu")
    evaluated = invoke("train", "eval", place / "target", runs["causal"], *more, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["settings"]["prompts"] == 4
    assert "tokens/round" in invoke("bench", "show", runs["causal"] / "eval.json").stdout
    result = invoke("train", "compare", runs["feature"], runs["causal"], "--plot", place / "compared.png")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tv+kl") == 2
    assert (place / "compared.png").stat().st_size > 1000
    assert read_run(runs["causal"]).kind == "causal"


def test_runs_are_compared_in_a_table_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the terminal's width, and not as Markdown, which nobody asked for."""
    figures = {"tokens_per_round": 2.5, "acceptance_by_position": [0.8, 0.6, 0.4, 0.2], "repeated_4grams": 0.1}
    both = {"0": figures, "1": figures}
    monkeypatch.setattr(report, "read_run", lambda folder: report.TrainRun(folder.name, "feature", "tv", 9, 99, both))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    result = invoke("train", "compare", tmp_path / "one", tmp_path / "other")
    assert result.exit_code == 0, result.output
    assert "Trained drafts" in result.stdout and result.stdout.count("2.50") == 4
    assert "|" not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_export(place: Path, runs: dict[str, Path]) -> None:
    refused = invoke("export", runs["feature"], place / "alone", "--target", place / "target", "--offline")
    assert refused.exit_code == 2 and "hidden states" in refused.stderr
    result = invoke("export", runs["causal"], place / "alone", "--target", place / "target", "--offline")
    assert result.exit_code == 0, result.output
    assert "vocabulary was reduced" in result.stderr
    assert AutoModelForCausalLM.from_pretrained(place / "alone").config.vocab_size == VOCAB
    assert (place / "alone" / "tokenizer.json").exists()


@pytest.mark.slow
def test_data_is_written_first_where_there_is_none(place: Path, brief_timing: None) -> None:
    (place / "few.txt").write_text("\n".join(f"Prompt number {i}" for i in range(9)), encoding="utf-8")
    more = ("--prompts", place / "few.txt", "--steps", "1", "--hold-out", "1", "--batch-tokens", "512")
    result = invoke("train", "draft", place / "target", "-o", place / "fresh", *more, "--device", "cpu", "--offline")
    assert result.exit_code == 0, result.output
    assert (place / "fresh" / "data" / "data.json").exists()
    assert (place / "fresh" / "forerun.json").exists()


class TestControlC:
    """While the target writes: what there is is kept, nothing else is begun, and the exit code says so."""

    @pytest.fixture
    def pressed_at(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """After how many looks Ctrl-C is pressed. Few rows at a time, so that some are done by then."""
        limit = [0.0]

        @contextmanager
        def watched() -> Iterator[Callable[[], bool]]:
            looks = count()
            yield lambda: next(looks) > limit[0]

        real = train_data.settings_from

        def small_batches(kind: Any, options: Any, **more: Any) -> Any:
            found = real(kind, options, **more)
            return replace(found, batch_size=4, max_new_tokens=10) if kind is WritingSettings else found

        monkeypatch.setattr(forerun.cli.run, "stop_on_interrupt", watched)
        monkeypatch.setattr(train_data, "settings_from", small_batches)
        return limit

    @pytest.mark.slow
    def test_ends_the_command_and_the_next_goes_on(
        self, place: Path, tmp_path: Path, pressed_at: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "p.txt").write_text("\n".join(f"prompt number {i}" for i in range(30)), encoding="utf-8")
        begun = []
        monkeypatch.setattr("forerun.train.loop.train_draft", lambda *_, **__: begun.append(True))
        asked = ("-p", tmp_path / "p.txt", "--device", "cpu", "--offline")
        pressed_at[0] = 14
        alone = invoke("train", "data", place / "target", *asked, "-o", tmp_path / "alone")
        assert alone.exit_code == INTERRUPTED, alone.output
        draft = ("train", "draft", place / "target", *asked, "-o", tmp_path / "mine", "--no-measure-cost")
        result = invoke(*draft)
        assert result.exit_code == INTERRUPTED and not begun, result.output
        assert "interrupted" in result.stdout and "goes on" in result.stderr
        kept = Shards(tmp_path / "mine" / "data").num_sequences
        assert 0 < kept < 30
        pressed_at[0] = math.inf
        monkeypatch.setattr("forerun.train.loop.train_draft", train_draft)
        finished = invoke(*draft, "--hold-out", "1", *TRAIN[:4])
        assert finished.exit_code == 0, finished.output
        assert Shards(tmp_path / "mine" / "data").num_sequences == 30


@pytest.mark.slow
def test_the_target_that_wrote_the_data_is_let_go_of(
    place: Path, tmp_path: Path, brief_timing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be in memory twice while the draft is trained."""
    loaded, alive, real, train = [], [], forerun.loading.load_model, forerun.train.loop.train_draft

    def load_noted(*arguments: Any, **options: Any) -> Any:
        model, tokenizer = real(*arguments, **options)
        loaded.append(weakref.ref(model))
        return model, tokenizer

    def counted(*arguments: Any, **options: Any) -> Any:
        alive.append([model() is not None for model in loaded])
        return train(*arguments, **options)

    monkeypatch.setattr(forerun.loading, "load_model", load_noted)
    monkeypatch.setattr(forerun.train.loop, "train_draft", counted)
    (tmp_path / "p.txt").write_text("\n".join(f"Prompt number {i}" for i in range(9)), encoding="utf-8")
    more = ("-p", tmp_path / "p.txt", "--steps", "1", "--hold-out", "1", "--batch-tokens", "512", "--no-measure-cost")
    older: list[Any] = [loaded]  # than the command: no less than the target among what it may keep from the collector
    result = invoke("train", "draft", place / "target", "-o", tmp_path / "mine", *more, "--device", "cpu", "--offline")
    assert result.exit_code == 0, result.output
    assert alive == [[False, True]] and any(one is older for one in gc.get_objects()), "the collector sees all again"
    assert (tmp_path / "mine" / "data" / "data.json").exists() and (tmp_path / "mine" / "forerun.json").exists()


def test_a_target_that_no_draft_can_be_trained_for_writes_nothing(tmp_path: Path) -> None:
    target = save(tmp_path / "gemma", tiny_model("gemma2", vocab=VOCAB))
    (tmp_path / "p.txt").write_text("a\nb\n", encoding="utf-8")
    for kind in KINDS:
        asked = ("-p", tmp_path / "p.txt", "--kind", kind, "--device", "cpu", "--offline")
        result = invoke("train", "draft", target, "-o", tmp_path / "mine", *asked)
        assert result.exit_code == 2 and "no draft can be trained" in result.stderr, result.output
        assert not (tmp_path / "mine").exists()


def test_rows_that_cannot_be_encoded_do_not_end_the_writing(tmp_path: Path) -> None:
    refusing = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    target = save(tmp_path / "m", tiny_model("llama", vocab=VOCAB), refusing + "{{ m['content'] }}{% endfor %}")
    talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    rows = [{"prompt": "good"}, {"messages": talk}, {"prompt": "half \ud83d"}, {"prompt": "fine"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    place = ("--max-new-tokens", "8", "--device", "cpu", "--offline")
    asked = ("train", "data", target, "-p", tmp_path / "p.jsonl", *place)
    result = invoke(*asked, "-o", tmp_path / "d", "--json")
    assert result.exit_code == 0, result.output
    assert "2 bad rows skipped" in result.stderr and json.loads(result.stdout)["sequences"] == 2
    strict = invoke(*asked, "-o", tmp_path / "strict", "--strict")
    assert strict.exit_code == 2 and "line 3" in strict.stderr and not (tmp_path / "strict").exists()
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows[:2])), encoding="utf-8")
    strict = invoke(*asked, "-o", tmp_path / "strict", "--strict")
    assert strict.exit_code == 2 and "line 2" in strict.stderr and "no system" in strict.stderr


@pytest.mark.parametrize("command", ["data", "eval", "compare", "ngram"])
def test_several_processes_run_no_other_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would do all of it, and write into the same folder."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = invoke("train", command, "target", "-o", "nowhere")
    assert result.exit_code == 2 and "started 2 processes" in result.stderr, result.output
    assert f"forerun train {command}" in result.stderr and "forerun train draft" in result.stderr


def test_several_processes_write_no_data(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = invoke("train", "draft", place / "target", "-p", place / "prompts.jsonl", "-o", tmp_path / "mine")
    assert result.exit_code == 2 and "2 processes" in result.stderr and "--data" in result.stderr, result.output


def test_mistakes_are_found_before_anything_is_loaded(place: Path) -> None:
    wrong = invoke("train", "draft", "no-such-model", "--data", place / "data", "-o", place / "x", "--loss", "l2")
    assert wrong.exit_code == 2 and "is no loss" in wrong.stderr
    nothing = invoke("train", "draft", "no-such-model", "-o", place / "x")
    assert nothing.exit_code == 2 and "--prompts" in nothing.stderr


@pytest.mark.parametrize("resume", [False, True])
def test_the_folder_is_looked_at_before_data_is_written(place: Path, tmp_path: Path, resume: bool) -> None:
    """The target that would write it is not even looked for."""
    if not resume:
        (tmp_path / "checkpoint.pt").touch()
    more = ("--resume",) if resume else ()
    result = invoke("train", "draft", "no/such/target", "-p", place / "prompts.jsonl", "-o", tmp_path, *more)
    assert result.exit_code == 2, result.output
    assert ("to resume from" if resume else "holds a run already") in " ".join(result.stderr.split())


@pytest.mark.slow
def test_one_process_of_accelerate_trains_the_same_weights(tmp_path: Path) -> None:
    target = markov_target()
    data = memory(written_by(target, 40, 20), 24)
    under = Processes()
    under._accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    for name, processes in (("alone", Processes()), ("under", under)):
        train_draft(target, data, small(steps=3), tmp_path / name, processes=processes)
    alone, other = (load_drafter(tmp_path / name)[2] for name in ("alone", "under"))
    assert all(torch.equal(alone[name], other[name]) for name in alone)
