"""`forerun generate` with models that read a text and answer with another."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from cli.command import Command
from support.folders import VOCAB, byte_tokenizer, save
from support.seq2seq import generated
from support.tiny import draft_of, tiny_model

SHORT = ("--max-new-tokens", "12")
PREFIX = "summarize: "
TASKS = {"summarization": {"prefix": PREFIX, "num_beams": 4}, "translation_en_to_de": {"prefix": "translate: "}}
TEXT = "a cat and a hat and a cat"


def answering() -> Any:
    model = copy.deepcopy(tiny_model("t5_gated", vocab=VOCAB))
    model.config.task_specific_params = TASKS
    return model


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("t5"), answering(), None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("small"), draft_of(answering()), None)


def wanted(text: str) -> list[int]:
    ids = byte_tokenizer()(text, return_tensors="pt").input_ids
    tokens: list[int] = generated(tiny_model("t5_gated", vocab=VOCAB), {"input_ids": ids}, max_new_tokens=12)[
        0
    ].tolist()
    return tokens[1:]


def said(output: str) -> list[int]:
    found: list[int] = json.loads(output)["prompts"][0]["texts"][0]["token_ids"]
    return found


@pytest.mark.quick("auto")
@pytest.mark.parametrize("drafter", ("none", "auto", "early:1", "small", "shared:small", "lookup,small"))
def test_every_drafter_gives_the_models_own_text(generate: Command, t5: str, small: str, drafter: str) -> None:
    name = drafter.replace("small", small)
    result = generate("-m", t5, "-d", name, "--policy", "3", "--json", *SHORT, TEXT)
    assert result.exit_code == 0, result.output
    assert said(result.stdout) == wanted(TEXT)


def test_a_task_puts_its_prefix_in_front_and_says_what_it_leaves(generate: Command, t5: str) -> None:
    result = generate("-m", t5, "--task", "summarization", "--json", *SHORT, TEXT)
    assert said(result.stdout) == wanted(PREFIX + TEXT) != wanted(TEXT)
    assert "not used: num_beams=4" in result.stderr
    quiet = generate("-m", t5, "--task", "translation_en_to_de", "-q", *SHORT, TEXT)
    assert quiet.exit_code == 0 and quiet.stderr == ""


def test_tasks_that_are_not_there_are_named(generate: Command, t5: str, target: str) -> None:
    result = generate("-m", t5, "--task", "translation_en_to_fr", *SHORT, TEXT)
    assert result.exit_code != 0
    assert "summarization, translation_en_to_de" in result.output
    assert "leave --task out" in generate("-m", target, "--task", "summarization", *SHORT, TEXT).output


@pytest.mark.slow
def test_compare_runs_transformers_beside_it(generate: Command, t5: str, small: str) -> None:
    result = generate("-m", t5, "-d", f"shared:{small}", "--compare", "--json", *SHORT, TEXT, "other words")
    found = json.loads(result.stdout)["compare"]
    assert [way["name"] for way in found["ways"]] == ["model.generate", "Forerun, plain", "Forerun, drafts"]
    assert found["identical"] == {"model.generate": True, "Forerun, plain": True}
    assert {way["tokens"] for way in found["ways"]} == {24}


@pytest.mark.slow
def test_a_difference_that_is_no_tie_is_told(generate: Command, t5: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison: a drafter's way that says something else."""
    from forerun.cli import compare

    right = compare._timed

    def wrong(name: str, done: Any) -> Any:
        timed = right(name, done)
        if name == compare.DRAFTS:
            timed.tokens[0][3] = (timed.tokens[0][3] + 1) % VOCAB
        return timed

    monkeypatch.setattr(compare, "_timed", wrong)
    result = generate("-m", t5, "--compare", "--json", *SHORT, TEXT)
    first = json.loads(result.stdout)["compare"]["differences"]["model.generate"][0]
    assert first["position"] == 3 and not first["is_tie"]


def test_commands_for_causal_models_say_so(check: Command, t5: str) -> None:
    result = check("-m", t5)
    assert result.exit_code != 0
    assert "encoder-decoder" in result.output and "forerun generate" in result.output
