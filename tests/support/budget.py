"""Which tests belong to the quick part of the suite, and what they cost.

`make test` has to stay short. A test is kept out of it by `@pytest.mark.slow`; of a parametrised test,
`@pytest.mark.quick("id", ...)` names the cases that stay in it, `@pytest.mark.quick(every=3)` leaves the first of every
three, and all others are slow. What every test takes is measured in CPU time, which other work on the machine does not
change, and the end of a run lists quick tests that are not quick.

`--time-limit SECONDS` bounds a run on a machine of unknown speed. One case of every test comes first, then repetitions;
tests that would begin later than the limit are skipped, and the end of the run says how many cases of which.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

LONGEST = 4.0  # seconds of CPU time of a test in the quick part; machines differ by two
OVER = "the time of this run is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write every test's CPU seconds to this file, longest first")
    parser.addoption("--time-limit", metavar="SECONDS", type=float, help="skip tests that would begin later than this")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes(config), "cpu-times")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named: dict[str, tuple[set[str], set[str]]] = {}  # of each marked test: the cases named, the cases there are
    counts: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is None:
            continue
        case, test = getattr(item, "callspec", None), test_of(item.nodeid)
        if case is None or bool(mark.args) is ("every" in mark.kwargs):
            raise pytest.UsageError(f"{item.nodeid}: mark.quick names cases of a parametrised test, or says every=n")
        if mark.args:
            wanted, there = named.setdefault(test, (set(mark.args), set()))
            there.add(case.id)
            is_quick = case.id in wanted
        else:
            is_quick = counts[test] % mark.kwargs["every"] == 0
            counts[test] += item.get_closest_marker("gpu") is None  # those are skipped where the others run
        if not is_quick:
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):  # else not all cases need have been collected
        for test, (wanted, there) in named.items():
            if unknown := wanted - there:
                raise pytest.UsageError(f"{test}: mark.quick names cases that do not exist: {sorted(unknown)}")


@pytest.hookimpl(tryfirst=True)  # before a worker tells what it has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--time-limit") is not None:
        session.items[:] = repetitions_last(session.items)


def repetitions_last(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The first case of every test, then its cases 2 to 4, 5 to 16 and so on: neighbours share what they set up."""
    turns, counts = dict[str, int](), Counter[str]()
    for item in items:
        test = test_of(item.nodeid)
        turns[item.nodeid] = (counts[test].bit_length() + 1) // 2
        counts[test] += 1
    return sorted(items, key=lambda item: turns[item.nodeid])


def test_of(nodeid: str) -> str:
    """The test that a case belongs to."""
    return nodeid.partition("[")[0]


class CpuTimes:
    """CPU seconds of every test, its set-up and its child processes included; sums in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: str | None = config.getoption("--cpu-times")
        self.limit: float | None = config.getoption("--time-limit")
        self.started = monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.slow: set[str] = set()
        self.left_out: Counter[str] = Counter()  # by test: cases that the time limit left out
        self.num_cases: Counter[str] = Counter()
        self.begun = self.before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        now = sum(os.times()[:4])
        report.cpu_seconds = now - self.before if call.when != "setup" else now - self.begun
        self.before = now
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self.limit is not None and monotonic() - self.started > self.limit:
            pytest.skip(OVER)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.begun = sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)
        if report.when == "setup":
            self.num_cases[test_of(report.nodeid)] += 1
            self.left_out[test_of(report.nodeid)] += report.skipped and OVER in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.seconds:
            return
        quick = {test: spent for test, spent in self.seconds.items() if test not in self.slow}
        slow = sum(self.seconds.values()) - sum(quick.values())
        terminalreporter.write_line(
            f"CPU time: {sum(quick.values()) / 60:.1f} min in quick tests, {slow / 60:.1f} min in slow ones"
        )
        if left_out := +self.left_out:
            terminalreporter.write_line(f"Left out after {self.limit:g} s, {left_out.total()} cases:")
            for test, number in left_out.items():
                terminalreporter.write_line(f"  {number} of {self.num_cases[test]}: {test}")
        for test, spent in sorted(quick.items(), key=lambda one: -one[1]):
            if spent > LONGEST:
                terminalreporter.write_line(f"  {spent:.1f} s, and not marked slow: {test}")
        if self.file is not None:
            ordered = (
                f"{spent:8.2f} {test}\n" for test, spent in sorted(self.seconds.items(), key=lambda entry: -entry[1])
            )
            Path(self.file).write_text("".join(ordered), encoding="utf-8")
