"""`forerun eval` on tiny models from end to end, perplexity against the model itself, and one run on a real model."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import forerun.loading
from eval.fakes import small_data, sums
from forerun.cli.main import INTERRUPTED, cli
from forerun.errors import InvalidArgument
from forerun.eval.evaluate import check_packages, sandbox_notes
from forerun.eval.journal import journal_path, pair_identity
from forerun.eval.methods import PLAIN, SPECULATIVE, DecoderMethod, IndexedPrompt, both
from forerun.eval.tasks import TASKS
from forerun.eval.windows import read, windows
from forerun.measure.record import load
from forerun.models.scorer import Scorer
from support.data import data_folder, needs
from support.folders import VOCAB, byte_tokenizer, save
from support.seq2seq import generated
from support.tiny import draft_of, tiny_model

SHORT = ("--max-new-tokens", "12", "--window", "64", "--limit", "3")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    models = {"embedded": model, "small": draft_of(model)}
    monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: (models[name], byte_tokenizer()))


def evaluate(*arguments: str, **environment: str) -> Result:
    usual = {"COLUMNS": "200", "FORERUN_DATA": "", "FORERUN_TEST_DATA": ""}
    return CliRunner().invoke(cli, ["eval", *arguments], env=usual | environment)


@pytest.mark.usefixtures("tiny")
def test_all_tasks_greedily(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    data, output = small_data(tmp_path / "data"), tmp_path / "out" / "r.json"
    asked = ("all", "--data", str(data), "-o", str(output), "--draft", "small", "--policy", "3", *SHORT)
    result = evaluate(*asked)
    assert result.exit_code == 0, result.output
    for words in ("ROUGE-2", "pass@1", "exact match", "perplexity", "the target itself", "same text", "mt_bench",
                  "No difference beyond noise on 7 tasks", "r.answers.jsonl", "ran behind"):  # fmt: skip
        assert words in result.output
    record = load(output)
    assert record.complete and len(record.rows) == 7
    for found in record.rows:
        if found["task"] != "wikitext2":
            assert found["verdict"] == "same text", found["task"]
            assert found["agreement"]["different"] == found["agreement"]["ties"] == 0
            assert found["speeds"][SPECULATIVE]["rounds"] < found["speeds"][PLAIN]["rounds"]
    assert str(tmp_path) not in output.read_text()
    shown = CliRunner().invoke(cli, ["bench", "show", str(output)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and shown.stdout == result.stdout
    again = evaluate(*asked)  # everything is there already
    assert again.exit_code == 0 and "resumed" in again.output
    written = evaluate(*asked, "--markdown")
    assert "| XSum | ROUGE-2 | 3 |" in written.stdout and evaluate(*asked, "--markdown", "--json").exit_code == 2


@pytest.mark.quick("3-1", "auto-1")
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("policy", "temperature"), [("auto", "1"), ("3", "1"), ("auto", "0")])
def test_sampled_answers_say_which_policy_drafted_them(tmp_path: Path, policy: str, temperature: str) -> None:
    """They name a seed, and with one "auto" takes no measured time into account."""
    sums(tmp_path, 2)
    asked = ("--draft", "small", "--policy", policy, "-t", temperature, *SHORT)
    result = evaluate("gsm8k", "--data", str(tmp_path), "-o", str(tmp_path / "r.json"), *asked)
    assert result.exit_code == 0, result.output
    said = "policy 'auto' left their draft lengths to OwnAcceptance" in (tmp_path / "r.json").read_text()
    assert said == ((policy, temperature) == ("auto", "1"))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_service_within_a_time_budget_as_json(tmp_path: Path) -> None:
    data, output = small_data(tmp_path / "data"), tmp_path / "r.json"
    result = evaluate("humaneval", "mbpp", "--data", str(data), "-o", str(output), "--num-sequences", "3", "--max-time",
                      "20", "-t", "1", "--json", *SHORT)  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert len(record["rows"]) == 2
    for finding in record["rows"]:
        assert [entry["metric"] for entry in finding["comparisons"]] == ["pass@1", "pass@3"]
        assert finding["services"]["plain"]["sequences"] == 3 and finding["agreement"] is None
        assert finding["services"]["speculative"]["all_latency"] > 0


@pytest.mark.usefixtures("tiny")
def test_a_task_without_data_is_reported_and_survived(tmp_path: Path) -> None:
    sums(tmp_path, 2)
    result = evaluate("gsm8k", "xsum", "--data", str(tmp_path), "-o", str(tmp_path / "r.json"), *SHORT)
    assert result.exit_code == 1 and "task 'xsum'" in result.output and "exact match" in result.output
    alone = evaluate("xsum", "--data", str(tmp_path))
    assert alone.exit_code == 2 and "xsum.jsonl" in alone.output and alone.output.count("task 'xsum'") == 1
    lost = evaluate("xsum", "--data", str(tmp_path / "lost"))
    assert lost.exit_code == 2 and "lost' is no folder" in lost.output
    nowhere = evaluate("xsum")
    assert nowhere.exit_code == 2 and "FORERUN_DATA" in nowhere.output


@pytest.mark.usefixtures("tiny")
def test_control_c_keeps_the_answers_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums(tmp_path, 4)
    output = tmp_path / "r.json"
    calls = iter(range(100))
    real = TASKS["gsm8k"].score

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    asked = ("gsm8k", "--data", str(tmp_path), "-o", str(output), "--batch-size", "1", *SHORT)
    with monkeypatch.context() as patch:
        patch.setitem(TASKS, "gsm8k", _with_score(interrupted))
        result = evaluate(*asked)
    assert result.exit_code == INTERRUPTED and "To go on" in result.output
    assert load(output).rows[0]["examples"] == 1 and not load(output).complete
    done = evaluate(*asked)
    assert done.exit_code == 0 and load(output).rows[0]["examples"] == 3


class TestAnswersOfAnotherPair:
    """Are not gone on with: they would be given out as this one's."""

    @pytest.fixture(scope="class")
    @classmethod
    def answered(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("answered")
        sums(folder / "data", 2)
        save(folder / "a" / "m", tiny_model("llama", vocab=VOCAB))
        save(folder / "a" / "d", draft_of(tiny_model("llama", vocab=VOCAB)))
        other = copy.deepcopy(tiny_model("llama", vocab=VOCAB))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-0.7)
        save(folder / "b" / "m", other)
        save(folder / "b" / "d", draft_of(other))
        assert cls.run(folder).exit_code == 0
        return folder

    @staticmethod
    def run(folder: Path, *more: str, model: str = "a/m", draft: str = "a/d") -> Result:
        pair = ("-m", str(folder / model), "--draft", str(folder / draft), "--device", "cpu", "--policy", "2")
        asked = ("gsm8k", "--data", str(folder / "data"), "-o", str(folder / "r.json"), "--offline", *pair)
        return evaluate(*asked, "--max-new-tokens", "4", *more, FORERUN_KERNELS="off")

    def test_the_same_command_goes_on(self, answered: Path) -> None:
        again = self.run(answered, "--kernels", "off")
        assert again.exit_code == 0 and "resumed after" in again.output
        shutil.copytree(answered / "a", answered / "moved")
        assert self.run(answered, model="moved/m", draft="moved/d").exit_code == 0
        for name in ("r.json", "r.answers.jsonl"):
            assert str(answered) not in (answered / name).read_text(), name

    @pytest.mark.parametrize(("changed", "named"), [
        ({"model": "b/m"}, "files of the model"), ({"draft": "b/d"}, "files of the draft"),
    ])  # fmt: skip
    def test_another_folder_of_the_same_name(self, answered: Path, changed: dict[str, str], named: str) -> None:
        result = self.run(answered, **changed)
        assert result.exit_code == 2 and named in result.output and "another --output" in result.output

    @pytest.mark.parametrize("option", [
        "--quantize int8", "--no-quantize-head", "--draft-quantize int8", "--dtype bfloat16", "--tree 4x2",
        "--draft-top-k 3", "--kernels on", "--attention pad",
    ])  # fmt: skip
    def test_another_way_of_running_it(self, answered: Path, option: str) -> None:
        name, *value = option.split()
        quantized = ("--quantize", "int8") if name == "--no-quantize-head" else ()
        result = self.run(answered, *quantized, name, *value)
        assert result.exit_code == 2 and "holds answers with" in result.output, result.output

    def test_what_cannot_be_had_on_a_cpu_counts_as_well(self) -> None:
        options = {"model": "nobody/nothing", "draft": "lookup", "kernels": None, "cache_dtype": None}
        plain = pair_identity(options, "cpu")
        assert pair_identity(options | {"cache_dtype": "int8"}, "cpu") != plain
        assert pair_identity(options, "cuda:0") != plain
        assert pair_identity(options | {"offline": True}, "cpu") == plain


def _with_score(score: Any) -> Any:
    from dataclasses import replace

    return replace(TASKS["gsm8k"], score=score)


def test_without_a_task_it_lists_them(tmp_path: Path) -> None:
    sums(tmp_path, 2)
    result = evaluate("--data", str(tmp_path))
    assert result.exit_code == 0 and "found test.jsonl (2 rows" in result.output and "needs HumanEval" in result.output
    assert evaluate("gsm9k").exit_code == 2
    assert evaluate("gsm8k", "--num-sequences", "2", "--data", str(tmp_path)).exit_code == 2
    assert evaluate("gsm8k", "--limit", "none").exit_code == 2


def test_a_scorer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages([TASKS["gsm8k"]])
    with pytest.raises(InvalidArgument, match=r"forerun\[eval\]"):
        check_packages([TASKS["xsum"]])


@pytest.mark.slow
def test_weak_walls_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.eval import evaluate
    from forerun.eval.sandbox.run import Ending, ProgramOutcome

    assert sandbox_notes([TASKS["gsm8k"]]) == []
    for walls, weak in ((("limits", "audit"), True), (("limits", "landlock", "seccomp", "audit"), False)):
        monkeypatch.setattr(
            evaluate, "run_program", lambda program, walls=walls: ProgramOutcome(Ending.PASSED, "", walls)
        )
        assert ("container" in sandbox_notes([TASKS["mbpp"]])[0]) == weak


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    model = tiny_model("llama", vocab=VOCAB)
    plain, _ = both(model, None, tokenizer=byte_tokenizer())
    keywords = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5, "num_return_sequences": 2}
    asked = [IndexedPrompt(index, (3 + index, 7, 9)) for index in range(3)]
    together = plain.answer(asked, dict(keywords)).prompts
    apart = [plain.answer([one], dict(keywords)).prompts[0] for one in asked]
    assert [[w.tokens for w in row] for row in together] == [[w.tokens for w in row] for row in apart]
    assert together[0][0].tokens != together[0][1].tokens and together[0][0].mean_logprob is not None


@pytest.mark.parametrize("way", [PLAIN, SPECULATIVE])
def test_windows_are_scored_as_the_model_itself_would(way: str) -> None:
    model = tiny_model("llama")
    text = torch.randint(1, 97, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    scorer = Scorer(model)
    total = 0.0
    for window in windows(text, 32):
        logits = torch.log_softmax(model(torch.tensor([window.tokens])).logits[0].double(), -1)
        expected = -sum(logits[i - 1, window.tokens[i]].item() for i in range(window.first, 32))
        nll, _ = read(scorer, window, way)
        assert nll == pytest.approx(expected, abs=1e-3)
        total += nll
    assert total > 0


def test_windows_score_each_token_once() -> None:
    found = windows(list(range(100)), 32)
    scored = [token for window in found for token in window.tokens[window.first :]]
    assert scored == list(range(1, 96)) and {len(window.tokens) for window in found} == {32}
    assert all(window.first >= 16 for window in found[1:])
    with pytest.raises(InvalidArgument, match="100 tokens"):
        windows(list(range(100)), 101)


@pytest.mark.model
@needs("gsm8k/test.jsonl")
@pytest.mark.slow
def test_on_the_embedded_model(embedded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: embedded)
    result = evaluate("gsm8k", "--data", str(data_folder()), "-o", str(tmp_path / "r.json"), "--limit", "1",
                      "--max-new-tokens", "4")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "r.json").rows[0]["verdict"] == "same text"


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_lossy_rule_can_be_evaluated_and_carries_the_word(tmp_path: Path) -> None:
    sums(tmp_path, 3)
    asked = ("gsm8k", "--data", str(tmp_path), "--draft", "small", "--policy", "3", "-t", "1", *SHORT)
    result = evaluate(*asked, "--rule", "lenient:0.5", "-o", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    record = load(tmp_path / "r.json")
    assert record.settings["rule"] == "lenient:0.5" and any("lossy" in note for note in record.details["notes"])
    lossless = evaluate(*asked, "-o", str(tmp_path / "s.json"))
    assert lossless.exit_code == 0 and not any("lossy" in note for note in load(tmp_path / "s.json").details["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_coupled_decoding_draws_the_same_answers_both_ways(tmp_path: Path) -> None:
    sums(tmp_path, 3)
    asked = ("gsm8k", "--data", str(tmp_path), "--draft", "small", "--policy", "3", "-t", "1", *SHORT)
    for rule, same in (("coupled", True), ("token", False)):
        output = tmp_path / f"{rule}.json"
        assert evaluate(*asked, "--rule", rule, "-o", str(output)).exit_code == 0
        lines = [json.loads(line) for line in journal_path(output).read_text().splitlines()]
        texts = {
            line["way"]: [row["answers"][0]["tokens"] for row in line["examples"]] for line in lines if "way" in line
        }
        assert (texts[PLAIN] == texts[SPECULATIVE]) == same


class TestModelsWithAnEncoder:
    """They read the document, behind the prefix their configuration names, and are asked nothing."""

    @pytest.fixture
    def t5(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        model = copy.deepcopy(tiny_model("t5_gated", vocab=VOCAB))
        model.config.task_specific_params = {"summarization": {"prefix": "summarize: ", "num_beams": 4}}
        models = {"t5": model, "small": draft_of(model)}
        monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: (models[name], byte_tokenizer(None)))
        return model

    def run(self, tmp_path: Path, task: str, *more: str) -> Result:
        data = small_data(tmp_path / "data")
        drafts = ("--draft", "shared:small", "--policy", "3")
        return evaluate(task, "-m", "t5", "--data", str(data), "-o", str(tmp_path / "r.json"), *drafts, *SHORT, *more)

    @pytest.mark.slow
    def test_summaries_are_the_models_own_behind_its_prefix(self, t5: Any, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        result = self.run(tmp_path, "xsum")
        assert result.exit_code == 0, result.output
        finding = load(tmp_path / "r.json").rows[0]
        assert finding["verdict"] == "same text"
        assert finding["speeds"][SPECULATIVE]["rounds"] < finding["speeds"][PLAIN]["rounds"]
        answers = [json.loads(line) for line in (tmp_path / "r.answers.jsonl").read_text().splitlines()]
        said = [row["answers"][0]["tokens"] for entry in answers for row in entry.get("examples", [])]
        documents = [example.text for example in TASKS["xsum"].read(tmp_path / "data").examples]
        wanted, bare = ([self.own(t5, prefix + text) for text in documents] for prefix in ("summarize: ", ""))
        assert said and all(tokens in wanted for tokens in said) and not any(tokens in bare for tokens in said)

    def own(self, model: Any, text: str) -> list[int]:
        ids = byte_tokenizer(None)(text, return_tensors="pt").input_ids
        return [int(token) for token in generated(model, {"input_ids": ids}, max_new_tokens=12)[0, 1:]]

    def test_texts_that_part_are_seen(self, t5: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("rouge_score")
        answer = DecoderMethod.answer

        def wrong(self: DecoderMethod, asked: Any, keywords: Any) -> Any:
            made = answer(self, asked, keywords)
            if self.name == PLAIN:
                return made
            rows = tuple(tuple(replace(w, tokens=(*w.tokens[:3], 5, *w.tokens[4:])) for w in p) for p in made.prompts)
            return replace(made, prompts=rows)

        monkeypatch.setattr(DecoderMethod, "answer", wrong)
        assert self.run(tmp_path, "xsum").exit_code == 0
        agreement = load(tmp_path / "r.json").rows[0]["agreement"]
        assert agreement["different"] == 3

    def test_questions_for_causal_models_are_refused(self, t5: Any, tmp_path: Path) -> None:
        result = self.run(tmp_path, "gsm8k")
        assert result.exit_code != 0
        assert "needs a causal model" in result.output and "xsum, cnn_dailymail" in result.output
