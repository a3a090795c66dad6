"""Methods take turns, so that a machine that slows down slows all of them; an interrupted run keeps what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from forerun.errors import kind_and_line
from forerun.measure.progress import Reporter

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Turn:
    """One piece of work whose result is kept as soon as it is there."""

    title: str
    run: Callable[[], None]
    cost: float = 1.0  # of the progress bar's total, in any unit


@dataclass(slots=True)
class TurnsOutcome:
    """How the turns ended."""

    complete: bool = False
    problems: tuple[str, ...] = ()  # sentences about turns that failed or were left out


def take_turns(
    turns: Iterable[Turn],
    reporter: Reporter,
    save: Callable[[TurnsOutcome], R],
    *,
    seconds: float | None = None,
    tolerant: bool = False,
) -> R:
    """Run all turns and call `save` after each; returns what it returned last.

    Ctrl-C ends the run with what there is: the outcome is then not complete. No turn begins later than `seconds` after
    the first. With `tolerant` a turn that raises is named among the problems and the next ones still run.
    """
    planned = list(turns)
    reporter.start("measuring", total=sum(turn.cost for turn in planned))
    outcome, started, left_out = TurnsOutcome(complete=not planned), perf_counter(), False
    saved = save(outcome)
    for turn in planned:
        reporter.start(turn.title)
        try:
            if seconds is not None and perf_counter() - started > seconds:
                left_out = True
                outcome.problems += (f"{turn.title} was left out: the time was over",)
            else:
                turn.run()
        except KeyboardInterrupt:
            return save(outcome)
        except Exception as error:
            if not tolerant:
                save(outcome)
                raise
            outcome.problems += (f"{turn.title} failed ({kind_and_line(error)[:200]})",)
        outcome.complete = turn is planned[-1] and not left_out
        reporter.advance(turn.cost)
        saved = save(outcome)
    return saved
