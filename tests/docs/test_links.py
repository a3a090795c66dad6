"""Every relative link of every page leads to a file that exists, and every anchor to a heading."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.pages import PAGES, anchors, links, name


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](page.md#one-thing) [b](page.md#another) [c](gone.md) [d](https://example.org)\n")
    assert broken(page) == ["page.md#another", "gone.md"]
