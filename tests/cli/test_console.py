"""Lines of the commands are printed as they are: names of files and packages may hold what rich takes for markup."""

from __future__ import annotations

import importlib.util
import io
import unicodedata
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import train_draft
from forerun.cli.console import TextOut, busy
from forerun.train.loop import Trained


def terminal() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=200, no_color=True), shown


@pytest.mark.parametrize("name", ("models/[red]", "models/[/b]"))
def test_a_name_with_brackets_is_shown_while_it_is_loaded(name: str) -> None:
    console, shown = terminal()
    with busy(console, f"loading {name}"):
        pass
    assert f"loading {name}" in shown.getvalue()


def test_a_model_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    steering = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    TextOut(terminal()[0]).write(f"a{steering}é\U0001f600")
    shown = capsys.readouterr().out
    assert [letter for letter in shown if unicodedata.category(letter) == "Cc"] == ["\t", "\n"]
    assert shown.startswith("a␀") and "␛" in shown and "␡" in shown and shown.endswith("é\U0001f600")
    TextOut(Console(file=io.StringIO())).write("a\x1b\r\x9b")
    assert capsys.readouterr().out == "a\x1b\r\x9b", "what is no terminal gets the text as it is"


def test_the_extra_that_draws_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console, shown = terminal()
    made = Trained(folder=tmp_path, steps=1, tokens=1, seconds=1.0, num_parameters=1, proxy=None)
    train_draft._print(made, console)
    assert "pip install 'forerun[train]'" in shown.getvalue()
