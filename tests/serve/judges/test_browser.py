"""The page at `/` in a real browser: Debian's chromium, driven by playwright. Skipped where either is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from serve.judges.environments import HERE, program, run
from serve.serving import Server


@pytest.mark.slow
def test_the_page_in_a_browser(server: Server, tmp_path: Path) -> None:
    """Chat, completion, colours by origin, plain decoding beside it, keyboard, phone, dark and light."""
    python, chromium = program("playwright", "python"), shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    assert "the page is content" in run([python, HERE / "ask_page.py", server.url, chromium, tmp_path])
    assert server.is_idle(), "whoever pressed Escape keeps no row"
