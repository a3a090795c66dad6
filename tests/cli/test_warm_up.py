"""What is to be seen of the minutes in which a server compiles and records: how much of how much, and for how long."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import count

import pytest
from rich.console import Console

from forerun.cli.service import warm_up
from forerun.engine import Engine
from forerun.engine.device.warm_up import WarmUp

TOTAL = 10


class Recording(Engine):
    """Records so many rounds, or none."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total, self.rows = total, 0

    def warm_up(
        self,
        rows: int = 64,
        draft: int | None = None,
        context: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> WarmUp:
        self.rows = rows
        assert report is not None
        for done in range(1, self.total + 1):
            report(done, self.total)
        return WarmUp(61.4, self.total, num_compiled=self.total // 3)


def shown(engine: Engine, is_terminal: bool) -> str:
    screen, clock = io.StringIO(), count(100.0, 2.0)
    console = Console(file=screen, force_terminal=is_terminal, width=200, no_color=True)
    warm_up(engine, 3, console, lambda: next(clock))
    return screen.getvalue()


def test_lines_where_nobody_watches_a_terminal() -> None:
    engine = Recording()
    lines = shown(engine, is_terminal=False).splitlines()
    assert lines == [
        "recorded 3 of 10 rounds in 6 s",
        "recorded 5 of 10 rounds in 10 s",
        "recorded 8 of 10 rounds in 16 s",
        "recorded 10 of 10 rounds in 20 s",
        "ready after 61 s: 10 rounds recorded, 3 kernels compiled",
    ]
    assert engine.rows == 3


def test_a_bar_on_a_terminal() -> None:
    screen = shown(Recording(), is_terminal=True)
    assert "reading prompts, 20 s" in screen and "100%" in screen
    assert "ready after 61 s: 10 rounds recorded" in screen
    assert "recorded 3 of 10" not in screen


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_stays_where_nothing_is_recorded(is_terminal: bool) -> None:
    assert "record" not in shown(Recording(0), is_terminal)
