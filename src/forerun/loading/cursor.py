"""Binary files of models, read value by value: one that ends too early is named, not misread."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from forerun.errors import ModelNotFound


class Cursor:
    """A place in a file that moves forward as little-endian values are read."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position
        with path.open("rb") as file:
            # A private mapping counts as writable, as torch wants its buffers; nothing is ever written.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def advance(self, size: int) -> int:
        """Step over `size` bytes and say where they begin."""
        start, end = self.position, self.position + size
        self.check_end(end)
        self.position = end
        return start

    def check_end(self, end: int) -> None:
        if end > len(self.data):
            raise ModelNotFound(
                f"{str(self.path)!r} is cut short or damaged: it should reach byte {end} and has {len(self.data)}; "
                "fetch it again"
            )

    def many(self, letter: str, count: int) -> list[Any]:
        """Numbers of a type by its letter in `struct`."""
        start = self.advance(struct.calcsize(letter) * count)
        return list(struct.unpack_from(f"<{count}{letter}", self.data, start))

    def scalar(self, letter: str) -> Any:
        return self.many(letter, 1)[0]

    def text(self, size: int) -> str:
        start = self.advance(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")
