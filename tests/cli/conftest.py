"""Folders with tiny models, and the commands that are given them.

Models are imported inside fixtures: a folder's conftest may be read before Triton's interpreter was chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli.command import Command


def _command(name: str) -> Command:
    from cli.command import Command

    return Command(name)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.folders import VOCAB, save
    from support.tiny import tiny_model

    return save(tmp_path_factory.mktemp("target"), tiny_model("llama", vocab=VOCAB))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.folders import VOCAB, save
    from support.tiny import draft_of, tiny_model

    return save(tmp_path_factory.mktemp("draft"), draft_of(tiny_model("llama", vocab=VOCAB)))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a chat template."""
    from support.folders import VOCAB, save
    from support.tiny import tiny_model

    return save(tmp_path_factory.mktemp("bare"), tiny_model("llama", vocab=VOCAB), None)


@pytest.fixture
def generate() -> Command:
    return _command("generate")


@pytest.fixture
def chat() -> Command:
    return _command("chat")


@pytest.fixture
def check() -> Command:
    return _command("check")


@pytest.fixture
def transcribe() -> Command:
    return _command("transcribe")
