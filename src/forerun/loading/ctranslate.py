"""Read CTranslate2's `model.bin` (version 6) with torch alone.

A header (version, name of the model's kind, its revision), one record a tensor (name, shape, type, bytes), then names
that stand for other tensors. Integers are little-endian, names end in a zero byte and are counted with it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ModelNotFound, UnsupportedModel

VERSION = 6
TYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16}
"""By the number CTranslate2 gives each."""


@dataclass(frozen=True, slots=True)
class CtranslateFile:
    """The contents of one file."""

    path: Path
    kind: str  # "WhisperSpec", "TransformerSpec" ...
    tensors: Mapping[str, Tensor]


def read_ctranslate(path: Path) -> CtranslateFile:
    """Open `path` and check that every tensor it lists is really there."""
    cursor = _Cursor(path)
    version = cursor.number("I")
    if version != VERSION:
        raise UnsupportedModel(f"{path} is no CTranslate2 model of version {VERSION} but {version}; fetch it again")
    kind = cursor.name()
    cursor.number("I")  # the revision of that kind: the layout of the file does not depend on it
    tensors = dict(_read_tensor(cursor) for _ in range(cursor.number("I")))
    for _ in range(cursor.number("I")):
        alias, name = cursor.name(), cursor.name()
        if name not in tensors:
            raise ModelNotFound(f"{path} is damaged: {alias!r} stands for {name!r}, which it lacks; fetch it again")
        tensors[alias] = tensors[name]
    return CtranslateFile(path, kind, tensors)


class _Cursor:
    """A place in the file that moves forward as values are read."""

    def __init__(self, path: Path) -> None:
        if not path.is_file() or not path.stat().st_size:
            raise ModelNotFound(f"no CTranslate2 model {str(path)!r}; check the path")
        self.path, self.position = path, 0
        with path.open("rb") as file:
            # A private mapping counts as writable, as torch wants its buffers; nothing is ever written.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def advance(self, size: int) -> int:
        """Step over `size` bytes and say where they begin."""
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ModelNotFound(
                f"{str(self.path)!r} is cut short or damaged: it should reach byte {self.position} and has "
                f"{len(self.data)}; fetch it again"
            )
        return start

    def number(self, letter: str) -> int:
        start = self.advance(struct.calcsize(letter))
        return int(struct.unpack_from(f"<{letter}", self.data, start)[0])

    def name(self) -> str:
        size = self.number("H")
        start = self.advance(size)
        return self.data[start : start + size - 1].decode("utf-8", errors="replace")


def _read_tensor(cursor: _Cursor) -> tuple[str, Tensor]:
    name = cursor.name()
    shape = [cursor.number("I") for _ in range(cursor.number("B"))]
    kind, size = cursor.number("B"), cursor.number("I")
    dtype = TYPES.get(kind)
    if dtype is None:
        raise UnsupportedModel(f"{cursor.path}: tensor {name!r} has type {kind}; this reader knows {list(TYPES)}")
    count = math.prod(shape)
    if size != count * dtype.itemsize:
        raise ModelNotFound(f"{cursor.path} is damaged: {name!r} of shape {shape} has {size} bytes; fetch it again")
    start = cursor.advance(size)
    # An odd address is no trouble for a copy, which is what a tensor of a file has to be in any case.
    raw = torch.frombuffer(cursor.data, dtype=torch.uint8, count=size, offset=start)
    return name, raw.clone().view(dtype).reshape(shape)
