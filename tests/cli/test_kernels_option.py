"""--kernels reaches the decoder from every command that has one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.command import Command
from forerun import decoder, kernels
from forerun.cli.main import COMMANDS, cli

needs_kernels = pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here")
PAGE = Path(__file__).parents[2] / "docs/cpu.md"
SHORT = ("--max-new-tokens", "6")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What decoders were told to use."""
    found: list[Any] = []
    real = decoder.scorer_of

    def scorer(*arguments: Any, use: Any, **more: Any) -> Any:
        found.append(use)
        return real(*arguments, use=use, **more)

    monkeypatch.setattr(decoder, "scorer_of", scorer)
    return found


def test_the_page_names_each_command_that_has_it() -> None:
    commands = {name: lazy.load() for name, lazy in COMMANDS.items()}
    having = {name for name, command in commands.items() if any(p.name == "kernels" for p in command.params)}
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| command line | `--kernels"))
    assert set(re.findall(r"`(\w+)`", line.partition(" of ")[2])) == having


@needs_kernels
def test_generate(generate: Command, target: str, draft: str, asked: list[Any]) -> None:
    texts = []
    for use in ("on", "off"):
        result = generate("-m", target, "-d", draft, "--no-chat", "--json", "--kernels", use, *SHORT, "hello hello")
        document = json.loads(result.stdout)
        assert document["kernels"] == use
        texts.append(document["prompts"][0]["texts"][0]["token_ids"])
    assert texts[0] == texts[1]
    assert asked == ["on", "off"]


@needs_kernels
def test_generate_compare(generate: Command, target: str, asked: list[Any]) -> None:
    result = generate("-m", target, "--no-chat", "--compare", "--kernels", "on", *SHORT, "hello hello")
    assert result.exit_code == 0, result.output
    assert asked == ["on", "on"]


@needs_kernels
def test_chat(chat: Command, target: str, asked: list[Any]) -> None:
    assert chat("-m", target, "--kernels", "on", *SHORT, stdin="hello\n").exit_code == 0
    assert asked == ["on"]


@needs_kernels
def test_check(check: Command, target: str, draft: str, asked: list[Any]) -> None:
    result = check("-m", target, "-d", draft, "--kernels", "on", "--samples", "128", "--top-k", "3", *SHORT)
    assert result.exit_code == 0, result.output
    assert asked and set(asked) == {"on"}


@pytest.mark.parametrize("command", ["generate", "chat", "check", "bench"])
def test_wrong_words_are_refused(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--kernels", "fast"])
    assert result.exit_code == 2
    assert "'fast' is not one of 'auto', 'on', 'off'" in result.output
