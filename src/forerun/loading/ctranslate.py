"""Read CTranslate2's `model.bin` (version 6) with torch alone.

A header (version, name of the model's kind, its revision), one record a tensor (name, shape, type, bytes), then names
that stand for other tensors. Integers are little-endian, names end in a zero byte and are counted with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ModelNotFound, UnsupportedModel
from forerun.loading.cursor import Cursor

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
    if not path.is_file() or not path.stat().st_size:
        raise ModelNotFound(f"no CTranslate2 model {str(path)!r}; check the path")
    cursor = Cursor(path)
    version = cursor.scalar("I")
    if version != VERSION:
        raise UnsupportedModel(f"{path} is no CTranslate2 model of version {VERSION} but {version}; fetch it again")
    kind = _name(cursor)
    cursor.scalar("I")  # the revision of that kind: the layout of the file does not depend on it
    tensors = dict(_read_tensor(cursor) for _ in range(cursor.scalar("I")))
    for _ in range(cursor.scalar("I")):
        alias, name = _name(cursor), _name(cursor)
        if name not in tensors:
            raise ModelNotFound(f"{path} is damaged: {alias!r} stands for {name!r}, which it lacks; fetch it again")
        tensors[alias] = tensors[name]
    return CtranslateFile(path, kind, tensors)


def _name(cursor: Cursor) -> str:
    return cursor.text(cursor.scalar("H")).removesuffix("\0")


def _read_tensor(cursor: Cursor) -> tuple[str, Tensor]:
    name = _name(cursor)
    shape = [cursor.scalar("I") for _ in range(cursor.scalar("B"))]
    kind, size = cursor.scalar("B"), cursor.scalar("I")
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
