"""A tiny model with a tokenizer of its own, saved as a user would have it: a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.cli.main import cli
from support.tiny import draft_of, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|end|>", "<|start|>")
VOCAB = 258


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters beyond ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def save(folder: Path, model: Any, template: str | None = TEMPLATE) -> str:
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), tiny_model("llama", vocab=VOCAB))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("draft"), draft_of(tiny_model("llama", vocab=VOCAB)))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a chat template."""
    return save(tmp_path_factory.mktemp("bare"), tiny_model("llama", vocab=VOCAB), None)


class Command:
    """`forerun NAME --device cpu ...` in this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: str, stdin: str | None = None, **environment: str) -> Result:
        place = [] if "--help" in arguments else ["--device", "cpu", "--offline"]
        return CliRunner(env=environment).invoke(cli, [self.name, *place, *arguments], input=stdin)


@pytest.fixture
def generate() -> Command:
    return Command("generate")


@pytest.fixture
def chat() -> Command:
    return Command("chat")


@pytest.fixture
def check() -> Command:
    return Command("check")


@pytest.fixture
def transcribe() -> Command:
    return Command("transcribe")
