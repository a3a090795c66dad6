"""How the tests themselves are laid out."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


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
