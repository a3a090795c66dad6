"""The page at `/`: one file that asks nobody but its own server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serve.serving import Server


def test_it_is_one_file_without_other_sources(server: Server) -> None:
    answer = server.client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", answer.text)


def test_every_element_that_the_script_names_is_there(server: Server) -> None:
    text = server.client.get("/").text
    named = set(re.findall(r'\$\("(\w+)"\)', text)) | set(re.findall(r'number\("(\w+)"\)', text))
    assert len(named) > 10
    assert not [name for name in named if f'id="{name}"' not in text]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_its_script_is_javascript(server: Server, tmp_path: Path) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", server.client.get("/").text, flags=re.DOTALL)
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)
