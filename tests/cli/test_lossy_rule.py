"""A lossy rule on the command line: every command that prints text or speed says the word."""

from __future__ import annotations

import json
import re

import pytest

from cli.command import Command
from forerun.bench.methods import METHODS, Bench
from forerun.bench.report import remarks
from forerun.bench.results import Results
from forerun.bench.settings import CompareSettings
from forerun.errors import InvalidArgument
from support.bench import ORIGIN
from support.tiny import tiny_model

SHORT = ("--max-new-tokens", "8", "--temperature", "1", "--seed", "1", "--policy", "3")
WORD = "the rule lenient:0.5 is lossy: sampled text does not follow the target's distribution"


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_generate_says_it_in_its_table_and_its_document(generate: Command, target: str) -> None:
    result = generate("-m", target, "-d", "random", *SHORT, "--rule", "lenient:0.5", "hello")
    assert result.exit_code == 0
    assert "LOSSY" in result.stderr and WORD in plain(result.stderr)
    document = json.loads(generate("-m", target, "--json", *SHORT, "--rule", "lenient:0.5", "hello").stdout)
    assert document["lossy"] == WORD == document["statistics"]["lossy"]
    assert document["rule"] == "lenient:0.5"


def test_a_lossless_rule_is_not_accused(generate: Command, target: str) -> None:
    result = generate("-m", target, "-d", "random", *SHORT, "--rule", "block", "hello")
    assert "LOSSY" not in result.stderr
    assert json.loads(generate("-m", target, "--json", *SHORT, "hello").stdout)["lossy"] is None


def test_compare_does_not_claim_the_same_law(generate: Command, target: str) -> None:
    result = generate("-m", target, "-d", "random", *SHORT, "--compare", "--rule", "lenient:0.5", "hello")
    assert f"LOSSY: {WORD}" in plain(result.stderr)
    assert "follow the same law" not in plain(result.stderr)
    result = generate("-m", target, "-d", "random", *SHORT, "--compare", "hello")
    assert "follow the same law" in plain(result.stderr)


def test_chat_says_it_before_the_first_answer(chat: Command, target: str) -> None:
    result = chat("-m", target, *SHORT, "--rule", "lenient:0.5", stdin="hello\n/stats\n")
    assert plain(result.stderr).count(WORD) == 2


@pytest.mark.parametrize(("rule", "reason"), [("lenent:0.5", "did you mean 'lenient'"), ("lenient:2", "below 1")])
def test_a_bad_rule_is_refused_before_anything_is_loaded(generate: Command, rule: str, reason: str) -> None:
    result = generate("-m", "no-such-model", "--rule", rule, "hello")
    assert result.exit_code == 2
    assert reason in plain(result.stderr)


@pytest.mark.slow
def test_check_fails_it(check: Command, target: str, draft: str) -> None:
    options = ("--samples", "100", "--max-new-tokens", "6", "--json", "--rule", "topk_importance:8")
    result = check("-m", target, "-d", draft, *options)
    assert result.exit_code == 1
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert found["lossy rule"]["outcome"] == "FAILED"
    assert found["lossy rule"]["numbers"]["divergence"]["total_variation"] > 0.05


def test_a_record_of_speed_says_it_in_titles_and_remarks() -> None:
    bench = Bench(tiny_model("llama"), None, 1.0, 0, rule="lenient:0.5")
    assert METHODS["forerun-random"](bench).title == "Forerun random drafts, LOSSY"
    assert METHODS["forerun-plain"](bench).title == "Forerun plain"  # without drafts nothing is judged
    settings = {"model": "x", "max_new_tokens": 1, "temperature": 1.0, "prompts": "y", "rule": "lenient:0.5"}
    assert any(WORD in line for line in remarks(Results(ORIGIN, settings, {}, ()), complete=True))
    del settings["rule"]  # records of older versions
    assert not any("LOSSY" in line for line in remarks(Results(ORIGIN, settings, {}, ()), complete=True))
    with pytest.raises(InvalidArgument, match="lenient"):
        CompareSettings(methods=("forerun",), rule="lenent:1")
