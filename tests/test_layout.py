"""How the tests themselves are laid out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_imports_a_test() -> None:
    """Running one file must not run, or depend on, another: shared code is in tests/support or a module beside it."""
    pattern = re.compile(r"^\s*(?:from|import)\s+(?:\w+\.)*(?:test_\w+|conftest)\b", flags=re.MULTILINE)
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    assert not [str(file.relative_to(TESTS)) for file in files if pattern.search(file.read_text(encoding="utf-8"))]
