"""How far something long has come: one interface, shown by a bar, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console


class Reporter(Protocol):
    """Whoever shows the progress of a measurement, an evaluation or a training run."""

    def start(self, what: str, total: float | None = None) -> None:
        """`what` begins. With a `total`, in any unit, a new bar begins; without one only its text changes."""
        ...

    def advance(self, amount: float = 1) -> None:
        """That much of the total is done."""
        ...

    def say(self, line: str) -> None:
        """A line that stays when the bar is gone."""
        ...


class Silent:
    """Nobody watches."""

    def start(self, what: str, total: float | None = None) -> None:
        """Not shown."""

    def advance(self, amount: float = 1) -> None:
        """Not shown."""

    def say(self, line: str) -> None:
        """Not shown."""


class Bar:
    """A spinner while the total is unknown, then a bar with the time that is left. Nothing but `say` off a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = console
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
            refresh_per_second=4,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def start(self, what: str, total: float | None = None) -> None:
        if total is not None:
            self._bar.reset(self._task, total=total)
        self._bar.update(self._task, description=what)

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
