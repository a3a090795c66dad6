"""Cases named quick stay in the quick part, the others leave it; what does not exist cannot be named."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

FILE = """
import pytest

@pytest.mark.quick({names})
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("a", ["x", "y"])
def test_cases(a, b):
    pass

def test_plain():
    sum(range(4_000_000))
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("support.budget.LONGEST", 0.02)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds to load
    pytester.makeini("[pytest]\nmarkers =\n  slow: slow\n  quick: quick")

    def run(names: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(FILE.format(names=names))
        return pytester.runpytest_inprocess("-p", "support.budget", "-p", "no:cacheprovider", *arguments)

    return run


def test_the_named_cases_are_quick_and_the_others_slow(run, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    run('"x-1", "y-2"', "-m", "not slow").assert_outcomes(passed=3, deselected=2)
    found = run('"x-1", "y-2"', "--cpu-times", str(pytester.path / "times"))
    found.assert_outcomes(passed=5)
    found.stdout.fnmatch_lines(["CPU time: *min in quick tests*", "*, and not marked slow: *::test_plain"])
    assert "test_cases[[]x-1[]]" not in found.stdout.str().partition("CPU time")[2]
    first, *others = (pytester.path / "times").read_text(encoding="utf-8").splitlines()
    assert first.endswith("::test_plain") and float(first.split()[0]) > 0.02 and len(others) == 4


@pytest.mark.parametrize("names", ['"x-3"', ""])
def test_names_of_no_case_are_refused(run, names: str) -> None:  # type: ignore[no-untyped-def]
    found = run(names)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*mark.quick names cases*"])


def test_what_would_begin_too_late_is_skipped_and_named(run) -> None:  # type: ignore[no-untyped-def]
    run('"x-1"', "--time-limit", "1e9").assert_outcomes(passed=5)
    late = run('"x-1"', "--time-limit", "0", "-rs")
    late.assert_outcomes(skipped=5)
    late.stdout.fnmatch_lines(["Left out*5 cases*", "*4 of 4: *::test_cases", "*the time of this run is over*"])


def test_a_limited_run_begins_with_one_case_of_every_test(run) -> None:  # type: ignore[no-untyped-def]
    lines = run('"x-1"', "-v", "--time-limit", "9").outlines
    names = [line.partition("::")[2].split()[0] for line in lines if "PASSED" in line]
    assert names == ["test_cases[x-1]", "test_plain", "test_cases[x-2]", "test_cases[y-1]", "test_cases[y-2]"]
