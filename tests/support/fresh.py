"""Workers begin to collect at different places: what one has compiled, the next finds on disk.

Pytest compiles a test file on its first import, with the asserts rewritten. In a fresh clone workers that go through
the files side by side would each compile all of them, eight seconds of CPU time a worker.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WORKER = "PYTEST_XDIST_WORKER"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if collector.path == TESTS and report.result and WORKER in os.environ:
        number = int(os.environ[WORKER].removeprefix("gw"))
        share = number / int(os.environ[f"{WORKER}_COUNT"])
        first = begin([bytes_of(node.path) for node in report.result], share)
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)  # before anybody counts cases
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of the files again: all workers have to tell the same."""
    if WORKER in os.environ:
        items.sort(key=lambda item: item.path.parts)


def begin(sizes: Sequence[int], share: float) -> int:
    """The first of them that has this share of all before it."""
    before = accumulate(sizes, initial=0)
    return next(place for place, size in enumerate(before) if size >= share * sum(sizes))


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*.py"))
