"""Files of one model are told from those of another, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forerun.loading.digest import PIECE, PIECES, files_digest
from support.folders import VOCAB, save
from support.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save(tmp_path / "one" / "model", tiny_model("llama", vocab=VOCAB)))


def test_the_same_files_elsewhere_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "two" / "model")
    assert files_digest(str(moved)) == files_digest(str(folder)) is not None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_of_a_small_file_is_another_model(folder: Path, name: str) -> None:
    before = files_digest(str(folder))
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    assert files_digest(str(folder)) != before


def test_notes_beside_a_model_do_not_count(folder: Path) -> None:
    before = files_digest(str(folder))
    (folder / "README.md").write_text("a note")
    (folder / "eval.json").write_text("{}")
    assert files_digest(str(folder)) == before


@pytest.mark.parametrize("place", [0.0, 0.3, 1.0])
def test_a_large_file_is_read_in_pieces_that_meet_every_matrix(tmp_path: Path, place: float) -> None:
    """A stretch of four times the pieces' distance is a small part of one matrix of a large model."""
    size = 4 * PIECES * PIECE
    file = tmp_path / "table"
    file.write_bytes(bytes(size))
    before = files_digest(str(file))
    stretch = size // 64
    with file.open("rb+") as writing:
        writing.seek(int(place * (size - stretch)))
        writing.write(b"\1" * stretch)
    assert files_digest(str(file)) != before
    file.write_bytes(bytes(size + 1))
    assert files_digest(str(file)) != before


@pytest.mark.parametrize("name", ["lookup", "early:4", "nobody/nothing", "/no/such/folder", ""])
def test_what_has_no_files_here_has_no_digest(name: str) -> None:
    assert files_digest(name) is None


def test_a_name_on_the_hub_is_told_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked = []

    def cached(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(tmp_path / "snapshots" / "hub" / "snapshots" / commit / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert files_digest("owner/name") == commit and files_digest("owner/name/sub.gguf") == commit
    assert asked == [("owner/name", "config.json"), ("owner/name", "sub.gguf")]
