"""Lines of the commands are printed as they are: names of files and packages may hold what rich takes for markup."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import train_draft
from forerun.cli.console import busy
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


def test_the_extra_that_draws_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console, shown = terminal()
    made = Trained(folder=tmp_path, steps=1, tokens=1, seconds=1.0, num_parameters=1, proxy=None)
    train_draft._print(made, console)
    assert "pip install 'forerun[train]'" in shown.getvalue()
