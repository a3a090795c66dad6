"""Every table that can be made, by the name of its command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.papers import bass, chen, int8, leviathan, service, sigmoid, theory, topk, verify
from benchmarks.papers.common import Setup
from benchmarks.papers.pairs import Pair
from forerun.measure.plot import Figure
from forerun.measure.record import Record


@dataclass(frozen=True, slots=True)
class Table:
    """One command."""

    name: str
    title: str
    minutes: float  # on two quiet cores
    measure: Callable[[Setup, Path | None, Pair | None], Record]
    figure: Callable[[Record], Figure]
    render: Callable[[Record], Sequence[str]]
    has_pair: bool = True


def _table(name: str, module: ModuleType, minutes: float, has_pair: bool = True) -> Table:
    return Table(name, module.TITLE, minutes, module.measure, module.figure, module.render, has_pair)


TABLES = {
    table.name: table
    for table in (
        _table("theory", theory, 0.1, has_pair=False),
        _table("chen", chen, 3.5),
        _table("leviathan", leviathan, 4),
        _table("bass", bass, 4),
        _table("int8", int8, 4),
        _table("service", service, 2),
        _table("verify", verify, 1.5),
        _table("sigmoid", sigmoid, 6),
        _table("topk", topk, 5),
    )
}
