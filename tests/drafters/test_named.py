"""Drafters by name: classes of a user's own, and names that stand for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.drafters import named_drafter
from forerun.errors import InvalidArgument

MINE = "from forerun import PromptLookup\n\n\nclass Mine(PromptLookup):\n    pass\n"


@pytest.mark.parametrize("module", ("module", "lookups", "early", "ngrams", "shared_draft"))
def test_a_module_may_have_any_name_that_python_finds(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`early` alone is taken: it stands for the target's first layers."""
    (tmp_path / f"{module}.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    if module == "early":
        with pytest.raises(InvalidArgument, match="say how many layers"):
            named_drafter(f"{module}:Mine")
    else:
        assert type(named_drafter(f"{module}:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all:Mine", "No module named 'nowhere_at_all'"),
        ("nowhere.at.all:Mine", "No module named 'nowhere'"),
        ("ngam:counts", "did you mean 'ngram'"),
        ("lokup", "did you mean 'lookup'"),
        ("lookup,", "it is empty. There are auto"),
        ("broken_drafter:Mine", "SyntaxError: invalid syntax"),
        ("raising_drafter:Mine", "RuntimeError: not today"),
        ("raising_package.drafter:Mine", "RuntimeError: nor tomorrow"),
    ],
)
def test_a_name_of_nothing_says_why(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_drafter.py").write_text("class Mine(:\n")
    (tmp_path / "raising_drafter.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "raising_package").mkdir()
    (tmp_path / "raising_package" / "__init__.py").write_text("raise RuntimeError('nor tomorrow')\n")
    (tmp_path / "raising_package" / "drafter.py").write_text("class Mine: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument) as refused:
        named_drafter(name)
    assert words in str(refused.value)
