"""Folders with tiny models, and the commands that are given them."""

from __future__ import annotations

import pytest

from cli.command import Command
from support.folders import VOCAB, save
from support.tiny import draft_of, tiny_model


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
