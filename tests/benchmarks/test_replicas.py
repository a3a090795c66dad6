"""A server with Ray beside one without: whose work is counted, and what is judged where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.replicas import ALONE, ONE, TWO, Measured, core_seconds, figure, goals
from benchmarks.serving.report import Measurement
from support.processes import wait_for

BUSY = """
import sys, time
while time.process_time() < 0.6:
    pass
sys.stdin.read()
"""
PROGRAM = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def measured(by: str, token: float, first: float, speed: float) -> Measured:
    return Measured(
        Measurement(by, "32 at a time", 32, None, 1, 0, 1.0, speed, first, first, token, token, None), token
    )


def test_goals_are_judged_both_ways_and_not_on_a_busy_machine() -> None:
    alone = measured(ALONE, 0.010, 0.1, 100.0)
    good = [alone, measured(ONE, 0.0104, 0.109, 95.0), measured(TWO, 0.02, 0.1, 86.0)]
    bad = [alone, measured(ONE, 0.0106, 0.111, 95.0), measured(TWO, 0.02, 0.1, 84.0)]
    assert sum("(reached" in line for line in goals(good, 0.1)) == 3
    assert sum("(missed" in line for line in goals(bad, 0.1)) == 3
    said = list(goals(bad, 1.5))
    assert len(said) == 2 and not any("missed" in line for line in said)
    assert "1.060 of the cores' time" in said[0]


def test_what_clients_saw_is_not_drawn_of_a_busy_machine() -> None:
    servers = [measured(ALONE, 0.010, 0.1, 100.0), measured(ONE, 0.012, 0.1, 95.0)]
    quiet, busy = figure(servers, 0.1, "m"), figure(servers, 1.5, "m")
    assert quiet is not None and busy is not None
    assert len(quiet.panels) == 4 and busy.panels == quiet.panels[:1]
    assert [(one.label, one.y) for one in busy.panels[0].series] == [(ALONE, (10.0,)), (ONE, (12.0,))]
    assert figure([], 0.1, "m") is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="work is read from /proc")
def test_the_work_of_descendants_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE) as process:
        own = f"/proc/{process.pid}/stat"
        wait_for(
            lambda: core_seconds(process.pid) > 0.3 + sum(map(int, Path(own).read_text().split()[13:15])) / 100, 30
        )
