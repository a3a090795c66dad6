"""Every page of docs/ has one place in the site's navigation, and every place has its page."""

from __future__ import annotations

import re

from docs.pages import ROOT

FROM_ELSEWHERE = {"index.md"}  # README.md, as docs/site.py puts it there


def places(config: str) -> list[str]:
    """Pages that the navigation names. The file has tags of Python objects, which no plain reader of YAML takes."""
    return re.findall(r": (\S+\.md)$", config.partition("\nnav:\n")[2], flags=re.MULTILINE)


def test_pages_and_places_are_the_same() -> None:
    found = places((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(found) == len(set(found))
    assert set(found) == pages | FROM_ELSEWHERE


def test_pages_of_the_navigation_are_read() -> None:
    config = 'docs_dir: docs\nhooks: [a.md]\nnav:\n  - One: index.md\n  - Two:\n      - "3, 4": b/c.md\n'
    assert places(config) == ["index.md", "b/c.md"]
