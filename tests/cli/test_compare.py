"""`forerun generate --compare`: texts that agree are told so, and what cannot be compared is not judged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cli.command import Command
from forerun.cli.compare import _until_stop
from support.folders import VOCAB, save
from support.tiny import tiny_model


def document(output: str) -> dict[str, Any]:
    found = json.loads(output)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", [None, 0])
def test_compare_with_stop_strings_that_end_rows_at_different_places(
    end: int | None, generate: Command, tmp_path: Path
) -> None:
    """Where a model has an end token, transformers pads the rows that end first with it; otherwise it writes on.
    Neither is part of a text, nor to be counted."""
    model = copy.deepcopy(tiny_model("llama", vocab=VOCAB))
    model.generation_config.eos_token_id = end
    prompts = ("hello hello", "a", "zebra")
    arguments = ("-m", save(tmp_path, model), "--no-chat", "--max-new-tokens", "24", "--json")
    written = [entry["texts"][0]["text"] for entry in document(generate(*arguments, *prompts).stdout)["prompts"]]
    letters = [letter for letter in sorted(set("".join(written))) if letter.isprintable() and letter.strip()]
    stop = next(letter for letter in letters if len({text.find(letter) for text in written}) > 1)
    found = document(generate(*arguments, "--compare", "--stop", stop, *prompts).stdout)["compare"]
    assert found["identical"] == {"model.generate": True, "Forerun, plain": True}, stop
    theirs, plain, drafts = (way["tokens"] for way in found["ways"])
    assert theirs == plain == drafts < 3 * 24


@pytest.mark.parametrize(("tokens", "wanted"), [
    ([5, 6, 7, 9, 9], [5, 6, 7]),  # padded behind "G"
    ([5, 6, 9, 9, 9], None),  # ended by its end token, which also pads: no stop was met
    ([5, 6, 8, 8, 8], None),  # not ended at all
    ([5, 6, 10, 9, 9], [5, 6, 10]),  # a stop of two letters in one token
    ([2, 5, 6, 8, 8], None),
])  # fmt: skip
def test_a_row_is_cut_where_its_padding_begins(tokens: list[int], wanted: list[int] | None) -> None:
    class Letters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join([*"abcdefgGh", "<end>", "xy"][token] for token in ids)

    assert _until_stop(tokens, 9, [1, 6], ("G", "xy"), Letters()) == wanted


def test_padding_may_be_what_a_stop_is_made_of() -> None:
    class Letters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join("!ab"[token] for token in ids)

    assert _until_stop([1, 2, 0, 1, 0], None, [1], ("!",), Letters()) == [1, 2, 0]  # nothing pads: it was written on
    assert _until_stop([1, 2, 0, 0, 0], 0, [1], ("!",), Letters()) == [1, 2, 0]
    assert _until_stop([0, 0, 0, 0, 0], 0, [1], ("a!",), Letters()) == [
        0
    ]  # begins in the prompt, as transformers has it


def test_texts_that_a_clock_has_cut_are_not_judged(generate: Command, target: str) -> None:
    arguments = ("-m", target, "--no-chat", "--max-new-tokens", "400", "--compare", "--max-time", "0.05", "hello", "a")
    result = generate(*arguments)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "time limit" in told and "DIFFERENT" not in told and "identical" not in told
    assert document(generate(*arguments, "--json").stdout)["compare"]["identical"] is None


class TestTheEndOfTheContext:
    """GPT-2 knows no position beyond it: model.generate fails there with an IndexError."""

    @pytest.fixture(scope="class")
    @classmethod
    def gpt2(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return save(tmp_path_factory.mktemp("gpt2"), tiny_model("gpt2", vocab=VOCAB), None)

    @staticmethod
    def length(folder: str) -> int:
        return int(json.loads((Path(folder) / "config.json").read_text())["n_positions"])

    @pytest.mark.parametrize("command", ["generate", "check"])
    def test_a_prompt_that_fills_it_is_refused(self, command: str, gpt2: str, tmp_path: Path) -> None:
        (tmp_path / "long.txt").write_text("ab " * self.length(gpt2))
        more = ("--compare",) if command == "generate" else ("--samples", "100")
        result = Command(command)("-m", gpt2, "-d", "lookup", *more, "-f", str(tmp_path / "long.txt"))
        assert result.exit_code == 2 and "context ends at" in result.output, result.output

    def test_texts_of_all_ways_end_there(self, generate: Command, gpt2: str) -> None:
        prompt = "x" * (self.length(gpt2) - 5)
        arguments = ("-m", gpt2, "--compare", "--json", "--max-new-tokens", "20", prompt, "hello hello")
        found = document(generate(*arguments).stdout)["compare"]
        assert found["identical"] == {"model.generate": True, "Forerun, plain": True}
        assert [way["tokens"] <= 10 for way in found["ways"]] == [True] * 3 and "after 5 tokens" in found["notes"][0]

    def test_a_check_that_would_pass_it_is_refused(self, check: Command, gpt2: str, tmp_path: Path) -> None:
        (tmp_path / "long.txt").write_text("x" * (self.length(gpt2) - 5))
        result = check("-m", gpt2, "-d", "lookup", "--samples", "100", "-f", str(tmp_path / "long.txt"))
        assert result.exit_code == 2 and "do not fit" in result.output, result.output
