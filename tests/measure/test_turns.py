"""Turns: the order, what is saved when, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from support.bench import Notebook


def raising(error: BaseException) -> Any:
    def run() -> None:
        raise error

    return run


def outcomes(turns: list[Turn], **how: Any) -> list[tuple[bool, tuple[str, ...]]]:
    saved: list[tuple[bool, tuple[str, ...]]] = []

    def save(outcome: TurnsOutcome) -> Any:
        saved.append((outcome.complete, outcome.problems))
        return saved[-1]

    assert take_turns(turns, Notebook(), save, **how) == saved[-1]
    return saved


def test_every_turn_is_saved_and_shown() -> None:
    done: list[str] = []
    notebook = Notebook()
    turns = [Turn(name, lambda n=name: done.append(n), cost=2.0) for name in "abc"]
    record = take_turns(turns, notebook, lambda outcome: (outcome.complete, tuple(done)))
    assert record == (True, ("a", "b", "c"))
    assert notebook.total == notebook.done == 6.0 and notebook.started[1:] == ["a", "b", "c"]


def test_control_c_keeps_what_there_is() -> None:
    turns = [Turn("a", lambda: None), Turn("b", raising(KeyboardInterrupt())), Turn("c", lambda: None)]
    assert outcomes(turns) == [(False, ())] * 3


def test_a_failure_is_saved_and_raised_unless_it_is_tolerated() -> None:
    turns = [Turn("a", raising(MemoryError("no memory\nfor this"))), Turn("b", lambda: None)]
    saved: list[bool] = []
    with pytest.raises(MemoryError):
        take_turns(turns, Notebook(), lambda outcome: saved.append(outcome.complete))
    assert saved == [False, False]
    assert outcomes(turns, tolerant=True)[-1] == (True, ("a failed (MemoryError: no memory)",))


def test_what_would_be_late_is_left_out() -> None:
    turns = [Turn("a", lambda: None), Turn("b", lambda: None)]
    complete, problems = outcomes(turns, seconds=-1.0)[-1]
    assert not complete and problems == tuple(f"{name} was left out: the time was over" for name in "ab")
