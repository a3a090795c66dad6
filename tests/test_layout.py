"""How the sources and the tests themselves are laid out."""

from __future__ import annotations

import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "forerun"


def repeated_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """Names that several files give a class, and these files."""
    homes = defaultdict(list)
    for file in files:
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
            homes[name].append(file.name)
    return {name: sorted(files) for name, files in homes.items() if len(files) > 1}


def test_a_class_name_stands_for_one_idea() -> None:
    """Who searches for a name, or reads it in a traceback, finds one class."""
    files = sorted(SOURCES.rglob("*.py"))
    assert len(files) > 100
    assert repeated_classes(files) == {}


def test_control_a_name_of_two_classes_is_seen(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f"class Pair: ...\n\n\nclass {name.title()}: ...\n", encoding="utf-8")
    assert repeated_classes(tmp_path.iterdir()) == {"Pair": ["one.py", "other.py"]}


def test_no_test_imports_a_test() -> None:
    """Running one file must not run, or depend on, another: shared code is in tests/support or a module beside it."""
    pattern = re.compile(r"^\s*(?:from|import)\s+(?:\w+\.)*(?:test_\w+|conftest)\b", flags=re.MULTILINE)
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    assert not [str(file.relative_to(TESTS)) for file in files if pattern.search(file.read_text(encoding="utf-8"))]


def test_names_that_tests_exchange_are_there() -> None:
    """A test that only a GPU runs would otherwise tell months later that a name has moved."""
    pytest.importorskip("triton")
    pattern = re.compile(r"""(?:setattr|delattr|patch)\(\s*["'](forerun\.[\w.]+)["']""")
    names = {name for file in TESTS.rglob("*.py") for name in pattern.findall(file.read_text(encoding="utf-8"))}
    assert len(names) > 20
    assert not sorted(name for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
