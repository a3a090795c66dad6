"""Tests that share what is dear to make go to one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xdist")

from support.fresh import begin
from support.workers import COMPILED, group_of

TESTS = Path(__file__).parents[1]


def test_files_stay_together_and_laws_go_one_by_one() -> None:
    assert group_of("tests/cli/test_plan.py::test_one[a::b]") == group_of("tests/cli/test_plan.py::TestAll::test_two")
    assert group_of("tests/cli/test_plan.py::test_one") != group_of("tests/bench/test_plan.py::test_one")
    assert group_of("tests/exactness/test_seeds.py::test_a[1]") != group_of("tests/exactness/test_seeds.py::test_a[2]")
    assert group_of("tests/cli/test_plan.py::test_one", slow=True) != group_of(
        "tests/cli/test_plan.py::test_two", slow=True
    )
    assert group_of("tests/models/test_cpu_body.py::test_a") == group_of("tests/benchmarks/test_cpu_steps.py::test_b")


def test_every_compiled_file_is_there() -> None:
    assert {path.stem for path in TESTS.rglob("test_*.py")} >= COMPILED


def test_workers_begin_to_collect_at_different_places() -> None:
    sizes = [10, 40, 10, 30, 10]
    assert [begin(sizes, share) for share in (0, 1 / 3, 2 / 3)] == [0, 2, 4]
