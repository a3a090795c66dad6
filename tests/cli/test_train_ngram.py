"""`forerun train ngram`: tables from text files and from shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from forerun.cli.main import cli
from forerun.config import SamplingParams
from forerun.drafters import NgramTable
from forerun.drafters.compatible import vocabulary_digest
from forerun.train.shards import Manifest, ShardWriter, TrainingText
from forerun.types import DraftContext, LawParams
from support.folders import VOCAB, byte_tokenizer, save
from support.tiny import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), tiny_model("llama", vocab=VOCAB))


def ngram(target: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["train", "ngram", "--offline", "--model", target, *arguments])


def guess(table: NgramTable, text: str, length: int = 4) -> str:
    """What the table says after `text`, greedily."""
    tokenizer = byte_tokenizer()
    history = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    context = DraftContext(
        rows=(0,), histories=(history,), max_lengths=(length,), params=LawParams.stack([SamplingParams()]),
        uniforms=torch.zeros(1, length, dtype=torch.float64), adjusters=(None,), vocab_size=VOCAB,
        device=torch.device("cpu"),
    )  # fmt: skip
    return str(tokenizer.decode(table.propose(context).tokens[0]))


def test_a_table_of_text_files_drafts_their_words(tmp_path: Path, target: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdef\nabcdxy\nabcdef\n" * 2 + "xyz abcdef\n", encoding="utf-8")
    result = ngram(target, str(path), "--order", "4", "--min-count", "1", "--output", str(tmp_path / "t.safetensors"))
    assert result.exit_code == 0, result.output
    table = NgramTable.load(tmp_path / "t.safetensors")
    assert table.order == 4 and table.tokenizer == vocabulary_digest(byte_tokenizer())
    assert guess(table, "xyz abc", 3) == "def"


def test_shards_count_the_targets_words_and_not_the_prompts(tmp_path: Path, target: str) -> None:
    tokenizer = byte_tokenizer()
    about = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB}
    writer = ShardWriter(tmp_path / "data", Manifest(about, 0, {}))
    for item in range(3):
        tokens = tokenizer("qrqrqr?mnopmnop", add_special_tokens=False)["input_ids"]
        writer.add(item, TrainingText(torch.tensor(tokens), 7))
    writer.flush()
    result = ngram(target, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "table"))
    assert result.exit_code == 0, result.output
    table = NgramTable.load(tmp_path / "table" / "ngram.safetensors")
    assert guess(table, "?") == "mnop"
    assert "r" not in guess(table, "q")


def test_mistakes_are_one_line(tmp_path: Path, target: str) -> None:
    for option in ("--order", "--min-count", "--max-continuations"):
        none = ngram(target, str(Path(__file__)), option, "0", "--output", str(tmp_path / "t.safetensors"))
        assert none.exit_code == 2 and f"{option} 0: must be at least 1" in none.stderr
    nothing = ngram(target, "--output", str(tmp_path / "t.safetensors"))
    assert nothing.exit_code == 2 and "--data" in nothing.stderr
    about = {"name": "other", "model_type": "llama", "hidden_size": 32, "vocab_size": 20}
    writer = ShardWriter(tmp_path / "data", Manifest(about, 0, {}))
    writer.add(0, TrainingText(torch.arange(10), 2))
    writer.flush()
    wrong = ngram(target, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "t.safetensors"))
    assert wrong.exit_code == 2 and "'other'" in wrong.stderr
