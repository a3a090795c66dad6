"""`check`, `eval`, `bench`, `chat` and `plan` of a split target: rank 0 does the work and says what came out, the
others follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import Command
from eval.fakes import small_data
from forerun.measure.record import load
from support.folders import VOCAB, save
from support.ranks import CommandRank, run_command
from support.tiny import tiny_model

DRAFT_SPLIT = "draft model: split over 2 processes, as asked"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("split")
    save(place / "draft", tiny_model("llama", seed=1, layers=1, vocab=VOCAB))
    return save(place, tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=512))


def run(name: str, folder: str, *arguments: str, stdin: str = "") -> CommandRank:
    asked = (folder,) if name == "plan" else ("--model", folder, "--draft-split", "on")
    asked = (*asked, "--draft", f"{folder}/draft", "--device", "cpu")
    first, other = run_command(2, name, *asked, *arguments, stdin=stdin, FORERUN_KERNELS="off", COLUMNS="200")
    assert (first.exit_code, other.exit_code) == (0, 0), first
    assert "Traceback" not in first.stderr
    return first


def test_check(folder: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one, two, one, two\nthree\n")
    few = ("--samples", "200", "--max-new-tokens", "6", "--file", str(tmp_path / "prompts"))
    said = run("check", folder, *few, "--json")
    found = json.loads(said.stdout)
    assert found["passed"] and found["tensor_parallel"] == 2 and DRAFT_SPLIT in said.stderr
    greedy = found["findings"][0]["numbers"]
    assert greedy["drafted"] and greedy["logit_deviation"] > 0


@pytest.mark.slow  # two processes that import all of it, as for the two that are tested always
def test_eval(folder: str, tmp_path: Path) -> None:
    """Texts are answered both ways and compared, and a text is read; then the answers are there already."""
    data, output = small_data(tmp_path / "data"), tmp_path / "r.json"
    asked = ("--max-new-tokens", "4", "--window", "64", "--limit", "2", "--policy", "3")
    asked = ("gsm8k", "wikitext2", "--data", str(data), "-o", str(output), *asked)
    run("eval", folder, *asked)
    record = load(output)
    assert record.complete and [row["task"] for row in record.rows] == ["gsm8k", "wikitext2"]
    assert record.rows[0]["agreement"]["different"] == 0
    assert record.rows[0]["speeds"]["speculative"]["drafted"]
    assert "the target was split over 2 processes" in output.read_text()


@pytest.mark.slow  # seven ways in each of two processes
def test_bench(folder: str, tmp_path: Path) -> None:
    """transformers' own ways are run by all ranks together."""
    output = tmp_path / "r.json"
    few = ("--categories", "qa", "--batch-sizes", "1", "--prompts-per-category", "1", "--max-new-tokens", "4")
    said = run("bench", folder, *few, "-o", str(output))
    record = load(output)
    ways = {row["method"]: row for row in record.rows}
    assert set(ways) == {
        "generate", "lookup", "assisted", "forerun-plain", "forerun", "forerun-draft", "forerun-random",
    }  # fmt: skip
    assert all(row["new_tokens"] == 4 for row in ways.values())
    assert all(row["agreement"]["different"] == 0 for name, row in ways.items() if name != "generate")
    assert record.settings["tensor_parallel"] == 2
    assert DRAFT_SPLIT in said.stderr and said.stderr.count("Record: ") == 1


def test_chat(folder: str) -> None:
    """Every turn of it, behind the keys of those before."""
    few = ("--max-new-tokens", "6", "--policy", "3")
    said = run("chat", folder, *few, stdin="hello\nhow are you\n/stats\n")
    alone = ("--model", folder, "--draft", f"{folder}/draft", "-q")
    whole = Command("chat")(*alone, *few, stdin="hello\nhow are you\n", FORERUN_KERNELS="off")
    assert whole.exit_code == 0 and whole.stdout and said.stdout == whole.stdout
    assert DRAFT_SPLIT in said.stderr and "12 in " in said.stderr, said.stderr


@pytest.mark.slow  # it decodes by every way that it compares
def test_plan(folder: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one, two, one, two\nthree\n")
    few = ("--max-new-tokens", "8", "--max-length", "2", "--repeats", "1", "--file", str(tmp_path / "prompts"))
    found = json.loads(run("plan", folder, *few, "--json").stdout)
    assert found["complete"] and found["details"]["acceptance"] and found["details"]["costs"]
    assert found["rows"] and found["details"]["advice"]
