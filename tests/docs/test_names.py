"""Names of modules, classes and files that the pages mention exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

from docs.pages import PAGES, ROOT, blocks, code_names, name

TESTS = ROOT / "tests"
CODE = ("src", "tests", "benchmarks", "recipes", "examples")
OTHERS = {"TextStreamer"}  # of transformers, used nowhere here
HISTORY = {"docs/log.md"}  # says what was called so on its day
DOTTED = re.compile(r"forerun(?:\.\w+)+")
FOLDERS = ("src", "tests", "benchmarks", "recipes", "docs", "examples", "requirements")
CALL = re.compile(r"[A-Za-z_][\w.]*(?:\(.*\))?")
COMPOUND = re.compile(r"(?:[A-Z][a-z0-9]+){2,}|\w+_\w+")  # CamelCase and snake_case: words of English are not names
FILE = re.compile(r"[\w.\-]+(?:/[\w.\-]+)+/?")


def resolves(dotted: str) -> bool:
    """Whether a name such as forerun.models.scorer.Scorer.feed can be looked up."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def exists(path: str, page: Path) -> bool:
    """A path from the root of the repository, of the package or of the page, or a module's without its suffix."""
    bases = (ROOT, ROOT / "src", ROOT / "src/forerun", page.parent)
    return any((base / path).exists() or (base / f"{path}.py").exists() for base in bases)


def is_path(text: str) -> bool:
    """A file of ours: begins at a folder of the repository, or is a Python file in a folder."""
    return bool(FILE.fullmatch(text)) and (text.split("/", maxsplit=1)[0] in FOLDERS or text.endswith(".py"))


@lru_cache
def words() -> frozenset[str]:
    """Every word of our Python files."""
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8")))


def strange(span: str) -> bool:
    """Whether a span such as `Engine.step` or `SparseLaw(ids, probs)` has a name that no file of ours has."""
    if not CALL.fullmatch(span) or span.endswith((".py", ".md", ".json", ".jsonl", ".txt", ".safetensors")):
        return False
    names = [word for word in span.partition("(")[0].split(".") if COMPOUND.fullmatch(word)]
    return any(word not in words() and word not in OTHERS for word in names)


def unknown(page: Path) -> list[str]:
    spans = code_names(page)
    dotted = {word for span in spans for word in DOTTED.findall(span)}
    dotted |= {word for code in (*blocks(page, "python"), *blocks(page, "py")) for word in DOTTED.findall(code)}
    gone = [found for found in dotted if not resolves(found) and not found.endswith(".json")]
    gone += [span for span in spans if is_path(span) and not exists(span, page)]
    gone += [span for span in spans if re.fullmatch(r"test_\w+\.py", span) and not list(TESTS.rglob(span))]
    gone += [span for span in spans if strange(span)]
    return sorted(gone)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in HISTORY], ids=name)
def test_names_exist(page: Path) -> None:
    assert not unknown(page)


def test_a_name_that_is_gone_is_noticed(tmp_path: Path) -> None:
    gone = ["Gone" + "Away", "forerun.engine.Gone", "src/forerun/gone.py", "test_gone.py"]
    there = ["forerun.Engine", "engine/engine.py", "a/b", "SparseLaw", "Engine.step"]
    page = tmp_path / "page.md"
    page.write_text(" ".join(f"`{span}`" for span in gone + there))
    assert unknown(page) == gone


def test_the_picture_of_the_layers_names_each() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    modules = re.findall(r"\w+", " ".join(contract["contracts"][0]["layers"]))
    picture = (ROOT / "docs" / "layers.svg").read_text(encoding="utf-8")
    titles = re.findall(r"\w+", " ".join(re.findall(r'font-weight="bold" fill="#1d2433">([^<]+)<', picture)))
    assert set(modules) - set(titles) == {"__main__", "version"}
