"""The target's last hidden states of every row, heard while the target works."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.ragged import RaggedCache
from forerun.types import RaggedRows


class Features:
    """One vector a token, kept for as long as its row: a row that is cut back anywhere can be read again from there.

    A vector is to the target's keys what one is to twice the layers, so that keeping all of them costs little. A row
    whose beginning was missed (its target was running before anybody listened) stays unheard.
    """

    def __init__(self) -> None:
        self._cache = RaggedCache()
        self._rows: set[int] = set()

    def admit(self, row: int) -> None:
        self._cache.admit(row)
        self._rows.add(row)

    def release(self, row: int) -> None:
        if row in self._rows:
            self._rows.remove(row)
            self._cache.release(row)

    def knows(self, row: int) -> bool:
        return row in self._rows

    def length(self, row: int) -> int:
        return self._cache.length(row) if row in self._rows else 0

    def rewind(self, row: int, length: int) -> None:
        if length < self.length(row):
            self._cache.rewind(row, length)

    def on_hidden_states(self, rows: Sequence[int], past: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        follows = [self._follows(row, length) for row, length in zip(rows, past, strict=True)]
        if not all(follows):
            parts = [part for part, wanted in zip(hidden.split(list(counts)), follows, strict=True) if wanted]
            rows, counts = ([x for x, wanted in zip(xs, follows, strict=True) if wanted] for xs in (rows, counts))
            if not parts:
                return
            hidden = torch.cat(parts)
        addresses = self._cache.addresses(self._cache.extend(rows, counts)).to(hidden.device)
        vectors = hidden.unsqueeze(1)
        self._cache.write(0, addresses, vectors, vectors[..., :0])

    def take(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[N, H] `counts[i]` vectors of each row from position `starts[i]` on, row by row."""
        slots = tuple(self._cache.slot(row) for row in rows)
        kept = self._cache.layers[0].flat[0].squeeze(1)
        return kept[self._cache.addresses(RaggedRows(slots, tuple(starts), tuple(counts))).to(kept.device)]

    def _follows(self, row: int, past: int) -> bool:
        """Whether new vectors go on where the row's own end."""
        return row in self._rows and self._cache.length(row) == past

    def on_keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        if row in self._rows and self._cache.length(row) > start:
            self._cache.keep(row, start, picks)

    def on_copy(self, source: int, row: int, length: int) -> None:
        if row in self._rows and self.length(source) >= length:
            self._cache.copy(source, row, length)
