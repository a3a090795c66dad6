"""What the site needs beyond the pages: README.md as its first page, and links that stay inside the site.

Pages link to sources and records of the repository, which the site does not hold: there such a link is its text.
A list may follow its paragraph without an empty line, as on GitHub; the site's Markdown needs one.
A link that is named after its file, which is what a reader of the files looks for, gets the page's title.
Pictures from outside of docs/ are copied into the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
LIST = re.compile(r"^(?![-|\s])(.+)\n(?=- )", flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    for page in DOCS.glob("*.md"):
        for picture, _, target in LINK.findall(page.read_text(encoding="utf-8")):
            source = (DOCS / target).resolve()
            if picture and not source.is_relative_to(DOCS):
                files.append(File.generated(config, f"pictures/{source.name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    folder = (DOCS / page.file.src_uri).parent

    def title(resolved: Path) -> str | None:
        linked = files.get_file_from_path(resolved.relative_to(DOCS).as_posix())
        return None if linked is None or linked.page is None else linked.page.title

    def inside(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path = target.partition("#")[0]
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        resolved = (folder / path).resolve()
        if picture:
            return match[0] if resolved.is_relative_to(DOCS) else f"![{text}](pictures/{resolved.name})"
        if not resolved.is_file() or not resolved.is_relative_to(DOCS):
            return text
        return f"[{title(resolved) or text}]({target})" if text.endswith(".md") else match[0]

    return LINK.sub(inside, LIST.sub(r"\1\n\n", markdown))
