"""Read GGUF files (versions 2 and 3) with torch alone.

A file is a header (magic, version, counts), the metadata, one record a tensor, and the tensors' bytes, each aligned.
Integers are little-endian; a tensor's dimensions are written fastest first, the reverse of torch's order.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelNotFound, UnsupportedModel
from forerun.loading.cursor import Cursor
from forerun.math.blocks import FORMATS, BlockFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
DEEPEST = 8
"""Arrays within arrays that are followed; real files have none."""

# The number of a metadata type -> its letter in `struct`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies in the file, and how it is written."""

    shape: tuple[int, ...]  # torch's order
    format: BlockFormat
    start: int  # bytes from the beginning of the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of one file; tensors are decoded when asked for."""

    path: Path
    metadata: Mapping[str, Any]
    records: Mapping[str, TensorRecord]
    data: mmap.mmap
    unread: Mapping[str, int]  # tensors that were left out, and the number of each one's format

    def tensor(self, name: str) -> Tensor:
        """One tensor, float32."""
        record = self.records[name]
        return record.format.decode(self.stored(name)).reshape(record.shape)

    def stored(self, name: str) -> Tensor:
        """The bytes of one tensor, in the file's own memory."""
        record = self.records[name]
        return torch.frombuffer(self.data, dtype=torch.uint8, count=record.size, offset=record.start)

    def need(self, key: str) -> Any:
        """One metadata value that has to be there."""
        if key not in self.metadata:
            raise UnsupportedModel(f"{self.path} has no {key!r} in its metadata; it needs another loader than this one")
        return self.metadata[key]


def read_gguf(path: Path, only: Collection[str] | None = None, skips_unknown: bool = False) -> GgufFile:
    """Open `path`, read its metadata, and check that every tensor it lists, or `only` those named, is really there.

    Tensors in formats that are not known are refused, or left out where it `skips_unknown` ones.
    """
    cursor = _open(path)
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = dict(_read_entry(cursor) for _ in range(num_values))
    listed = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    base = _aligned(cursor, metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    wanted = [entry for entry in listed if only is None or entry[0] in only]
    unread = {name: kind for name, _, kind, _ in wanted if kind not in FORMATS} if skips_unknown else {}
    records = {
        name: _record(cursor, name, shape, kind, base + offset)
        for name, shape, kind, offset in wanted
        if name not in unread
    }
    return GgufFile(path, metadata, records, cursor.data, unread)


def check_whole(file: GgufFile) -> None:
    """Raise for one of the files that a large model was split into: alone it lacks the weights of the others."""
    count = file.metadata.get("split.count", 1)
    if count > 1:
        number = file.metadata.get("split.no", 0) + 1
        raise UnsupportedModel(
            f"{str(file.path)!r} is part {number} of {count} of a model; join them with llama.cpp: "
            "llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        )


def _open(path: Path) -> _GgufCursor:
    if not path.is_file():
        raise ModelNotFound(f"no GGUF file {str(path)!r}; check the path")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelNotFound(f"{str(path)!r} is not a GGUF file (it does not begin with {MAGIC!r}); fetch it again")
    cursor = _GgufCursor(path, len(MAGIC))
    if (version := cursor.scalar("I")) not in VERSIONS:
        raise UnsupportedModel(f"{path} is GGUF version {version}; versions {VERSIONS} can be read")
    return cursor


class _GgufCursor(Cursor):
    """Reads values by the numbers GGUF gives their types."""

    def string(self) -> str:
        return self.text(self.scalar("Q"))

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"), depth + 1)
        return self.scalar(self.letter(kind))

    def array(self, kind: int, count: int, depth: int) -> list[Any]:
        if depth > DEEPEST:
            raise ModelNotFound(f"{str(self.path)!r} is damaged: arrays more than {DEEPEST} deep; fetch it again")
        if kind in (_STRING, _ARRAY):
            self.check_end(self.position + count)  # each takes some bytes, so no more than there are
            return [self.value(kind, depth) for _ in range(count)]
        return self.many(self.letter(kind), count)

    def letter(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelNotFound(f"{str(self.path)!r} is damaged: metadata of unknown type {kind}; fetch it again")
        return _SCALARS[kind]


def _read_entry(cursor: _GgufCursor) -> tuple[str, Any]:
    return cursor.string(), cursor.value(cursor.scalar("I"))


def _read_tensor_entry(cursor: _GgufCursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.many("Q", cursor.scalar("I"))
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    return name, tuple(reversed(dimensions)), kind, offset


def _aligned(cursor: _GgufCursor, alignment: Any) -> int:
    """Where the tensors' bytes begin: the next multiple of `alignment`."""
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelNotFound(f"{str(cursor.path)!r} is damaged: an alignment of {alignment!r}; fetch it again")
    return -(-cursor.position // alignment) * alignment


def _record(cursor: _GgufCursor, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorRecord:
    if kind not in FORMATS:
        known = ", ".join(form.name for form in FORMATS.values())
        raise UnsupportedModel(f"{cursor.path}: tensor {name!r} has format number {kind}; this reader knows {known}")
    form = FORMATS[kind]
    blocks, rest = divmod(math.prod(shape), form.values)
    if rest or not blocks:
        raise ModelNotFound(
            f"{cursor.path} is damaged: {name!r} of shape {shape} is no whole number of {form.name} blocks"
        )
    cursor.check_end(start + blocks * form.size)
    return TensorRecord(shape, form, start, blocks * form.size)
