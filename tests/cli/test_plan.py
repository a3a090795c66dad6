"""`forerun plan` as typed: tables, JSON, a picture, and errors that say what to do."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.command import Command
from forerun.cli.main import cli
from forerun.cli.plan import _drafters
from forerun.drafters import NgramTable
from forerun.plan import rounds
from support.tiny import tiny_model

PAIR = "synthetic:tiny+mini@0.87"
QUICK = ("--max-length", "3", "--max-new-tokens", "12", "--repeats", "2", "--prompts", "2", "--prompt-tokens", "16")


@pytest.fixture
def plan() -> Command:
    return Command("plan")


def _prompts(folder: Path) -> Path:
    path = folder / "mine.txt"
    path.write_text("one two\nthree four\nfive six\n")
    return path


@pytest.mark.slow
def test_a_synthetic_pair_needs_no_tokenizer(plan: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, output = tmp_path / "plan.png", tmp_path / "plan.json"
    result = plan(
        PAIR, *QUICK, "-d", "own", "-d", "random", "--contexts", "24", "--plot", str(picture), "-o", str(output),
        FORERUN_KERNELS="off", COLUMNS="200",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in (
        "alpha",
        "times plain: predicted",
        "Leviathan",
        "own, batch 1",
        "stretched prompts",
        "Batch 1, temperature 1:",
    ):
        assert words in result.stdout
    assert picture.stat().st_size > 10_000
    record = json.loads(output.read_text())
    assert record["kind"] == "plan"
    assert record["complete"] is True


@pytest.mark.slow
def test_json_says_everything(plan: Command) -> None:
    result = plan(PAIR, *QUICK, "--temperatures", "0,1", "--batch-sizes", "1,2", "--json", FORERUN_KERNELS="off")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {
        "format", "kind", "provenance", "settings", "rows", "details", "tables", "remarks", "headline", "figure",
        "complete",
    }  # fmt: skip
    details = found["details"]
    assert set(details) == {"operations", "acceptance", "costs", "advice", "notes"}
    assert found["settings"]["target"] == PAIR
    assert found["settings"]["temperatures"] == [0.0, 1.0]
    assert set(details["operations"]) == {"own"}
    assert [(c["batch"], c["temperature"]) for c in found["rows"]] == [(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)]
    for cell in found["rows"]:
        assert [entry["length"] for entry in cell["predictions"]] == [0, 1, 2, 3]
        assert {entry["length"] for entry in cell["checked"]} >= {0, cell["best"]}
        assert {"tokens_per_round", "factor", "operations", "formula", "counted"} <= set(cell["predictions"][1])
    assert details["acceptance"] and details["costs"]
    for facts in details["acceptance"]:
        assert len(facts["by_position"]) == len(facts["reached"]) == 3
        assert 0 < facts["alpha"] <= 1
    for facts in details["costs"]:
        assert set(facts["draft_ratio"]) == set(facts["score_ratio"]) == {"1", "2", "3"}
    assert len(details["advice"]) == len(found["rows"]) == 4
    assert all("factor_error" in cell["verdict"] for cell in found["rows"])


@pytest.mark.slow
def test_a_drafter_that_cannot_help_is_not_recommended(
    plan: Command, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where drafts are free: on this clock every round takes equally long."""
    ticks = itertools.count()
    monkeypatch.setattr(rounds, "Engine", partial(rounds.Engine, clock=lambda: float(next(ticks))))
    result = plan(target, "-d", "random", "-f", str(_prompts(tmp_path)), *QUICK, "--prompt-tokens", "64", COLUMNS="200")
    assert result.exit_code == 0, result.output
    assert "use no drafter" in result.stdout
    assert "predicted that no draft pays, right" in result.stdout
    helped = plan(target, "-d", target, "-f", str(_prompts(tmp_path)), *QUICK, "--prompt-tokens", "64", COLUMNS="200")
    assert "with drafts of 3, 4.00 times plain (measured)" in helped.stdout


@pytest.mark.slow
def test_a_record_can_be_shown_again(plan: Command, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    first = plan(PAIR, *QUICK, "-o", str(output), FORERUN_KERNELS="off", COLUMNS="200")
    again = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["bench", "show", str(output)])
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
    output.write_text(output.read_text().replace('"headings"', '"headlines"'))
    broken = CliRunner().invoke(cli, ["bench", "show", str(output)])
    assert broken.exit_code == 2
    assert "damaged record" in broken.output


@pytest.mark.slow
def test_a_drafter_made_of_the_targets_own_layers(plan: Command, target: str, tmp_path: Path) -> None:
    """Nobody knows what it costs before it is bound."""
    result = plan(
        target,
        "-d",
        "early:1",
        "-f",
        str(_prompts(tmp_path)),
        "--check",
        "none",
        "--json",
        *QUICK,
        "--prompt-tokens",
        "64",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["drafter"] == "early:1"


@pytest.mark.slow
def test_your_own_prompts(plan: Command, target: str, draft: str, tmp_path: Path) -> None:
    result = plan(
        target, "-d", draft, "-f", str(_prompts(tmp_path)), "--check", "none", "--json", *QUICK, "--prompt-tokens", "64"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["prompts"] == "mine.txt"
    assert found["settings"]["num_prompts"] == 2
    assert found["rows"][0]["checked"] == []
    assert str(tmp_path) not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("synthetic:huge+mini",), "no size 'huge'"),
        ((PAIR, "-d", "none"), "always measured"),
        (("embedded", "-d", "own"), "only synthetic pairs"),
        ((PAIR, "--max-new-tokens", "4"), "at least"),
        ((PAIR, "--max-length", "99"), "not planned"),
        ((PAIR, "--temperatures", "warm"), "numbers separated by commas"),
        ((PAIR, "--temperatures", "-1"), "greedy"),
        ((PAIR, "--batch-sizes", "0"), "at least 1"),
        ((PAIR, "--plot", "plan.txt"), "must end in"),
        ((PAIR, "--prompts", "2", "--batch-sizes", "4"), "batch of 4"),
    ],
)
def test_errors_say_what_to_do(plan: Command, arguments: tuple[str, ...], words: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_contexts_must_fit(plan: Command, target: str) -> None:
    result = plan(target, "--contexts", "9999", *QUICK)
    assert result.exit_code == 2
    assert "room for" in result.output


def test_help_teaches(plan: Command) -> None:
    output = " ".join(plan("--help").output.split())
    for words in (
        "synthetic:6.7b+0.33b@0.87",
        "recommends a drafter, or none",
        "[default: near]",
        "[default: (auto and lookup)]",
    ):
        assert words in output


@pytest.mark.parametrize("name", ["off", "none", " off"])
def test_plain_decoding_is_no_drafter_to_choose(plan: Command, target: str, name: str) -> None:
    result = plan(target, "-d", name)
    assert result.exit_code == 2 and f"--draft {name.strip()}" in result.output and "always measured" in result.output


def test_prompts_of_a_file_are_bounded_where_that_is_asked(plan: Command, target: str, tmp_path: Path) -> None:
    """By default they are yours, and all of them count."""
    path = tmp_path / "p.txt"
    path.write_text(
        "\n".join(f"a prompt that is rather long, number {i}" for i in range(3)) + "\na\n", encoding="utf-8"
    )
    quick = ("-d", "lookup", "--check", "none", "--max-length", "1", "--max-new-tokens", "4", "--repeats", "1")
    counts = []
    for more in ((), ("--prompt-tokens", "30")):
        result = plan(target, "-f", str(path), *quick, "--json", *more, FORERUN_KERNELS="off")
        assert result.exit_code == 0, result.output
        counts.append(json.loads(result.stdout)["settings"]["num_prompts"])
    assert counts == [4, 1]
    none = plan(target, "-f", str(path), *quick, "--prompt-tokens", "8")
    assert none.exit_code == 2 and "at most 8 tokens" in none.output


def test_drafters_of_two_folders_are_both_measured(tmp_path: Path) -> None:
    """Records do not say where files lay, so that two of one name are told apart by their places."""
    names = [f"ngram:{tmp_path / folder / 'table.safetensors'}" for folder in "abc"]
    for token, name in enumerate(names):
        path = Path(name.removeprefix("ngram:"))
        path.parent.mkdir()
        counted = [[token, token + 1] * 4]
        NgramTable.count(counted, 2, vocab_size=97, min_count=1, max_continuations=8, tokenizer=None).save(path)
    found = _drafters([*names, "lookup"], tiny_model("llama"), {}, chosen=True)
    short = "ngram:table.safetensors"
    assert list(found) == [short, f"{short} (2)", f"{short} (3)", "lookup"]
