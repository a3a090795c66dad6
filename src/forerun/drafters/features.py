"""The target's last hidden states of every row, heard while the target works."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from forerun import ops
from forerun.cache.base import KeyValueCache
from forerun.cache.ragged import RaggedCache
from forerun.models.scorer import Scorer
from forerun.types import RaggedRows

MOST_WAITING = 32  # rounds without drafts whose vectors are stored together


class Features:
    """One vector a token, kept for as long as its row: a row that is cut back anywhere can be read again from there.

    A vector is to the target's keys what one is to twice the layers, so that keeping all of them costs little. A row
    whose beginning was missed (its target was running before anybody listened) stays unheard. On a CPU vectors of
    rounds without drafts wait until somebody reads them: to store those of each round would cost as much as all else
    that listening costs. Of long prompts the target may hand over what lies before its last layer, which is then run
    when somebody reads them.
    """

    def __init__(self, cache: KeyValueCache | None = None) -> None:
        self.cache = RaggedCache() if cache is None else cache
        self._rows: set[int] = set()
        self._unfinished: dict[int, list[range]] = {}  # by row: positions whose vectors lie before the last layer
        self._waiting = _Waiting()

    def admit(self, row: int) -> None:
        self._store()  # a bounded cache has less room for each row when there is one more
        self.cache.admit(row)
        self._rows.add(row)

    def release(self, row: int) -> None:
        if row in self._rows:
            self._store()
            self._rows.remove(row)
            self._unfinished.pop(row, None)
            self.cache.release(row)

    def knows(self, row: int) -> bool:
        return row in self._rows

    def length(self, row: int) -> int:
        return self.cache.length(row) + self._waiting.count(row) if row in self._rows else 0

    def rewind(self, row: int, length: int) -> None:
        if length < self.length(row):
            self._store()
            self.cache.rewind(row, length)
            self._forget(row, range(length, sys.maxsize))

    def on_hidden_states(
        self,
        rows: Sequence[int],
        past: Sequence[int],
        counts: Sequence[int],
        hidden: Tensor,
        finished: Sequence[int] | None = None,
    ) -> None:
        finished = counts if finished is None else finished
        is_round = len(hidden) == len(rows) == sum(finished)  # one vector a row
        if is_round and self._waiting.goes_on(rows, past, hidden):
            return
        self._store()
        follows = [self._follows(row, length) for row, length in zip(rows, past, strict=True)]
        if is_round and not hidden.is_cuda and all(follows):
            self._waiting.begin(rows, past, hidden)
            return
        if not all(follows):
            parts = list(compress(hidden.split(list(counts)), follows))
            rows, past, counts, finished = (list(compress(each, follows)) for each in (rows, past, counts, finished))
            if not parts:
                return
            hidden = torch.cat(parts)
        self._write(rows, counts, hidden)
        for row, first, count, tail in zip(rows, past, counts, finished, strict=True):
            if tail < count:
                self._unfinished.setdefault(row, []).append(range(first, first + count - tail))

    def _store(self) -> None:
        """What waits."""
        rows, count, hidden = self._waiting.all()
        if count:
            self._write(rows, [count] * len(rows), hidden)
            self._waiting = _Waiting()

    @torch.inference_mode()  # as passes are: rows may be cut back and released outside of one
    def _write(self, rows: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        addresses = self.cache.addresses(self.cache.extend(rows, counts)).to(hidden.device)
        vectors = hidden.unsqueeze(1)
        self.cache.write(0, addresses, vectors, vectors[..., :0])

    def take(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], target: Scorer) -> Tensor:
        """[N, H] `counts[i]` vectors of each row from position `starts[i]` on, row by row."""
        self.finish(rows, [range(start, start + count) for start, count in zip(starts, counts, strict=True)], target)
        kept = self._kept
        return kept[self._places(rows, starts, counts).to(kept.device)]

    @torch.inference_mode()
    def finish(self, rows: Sequence[int], wanted: Sequence[range], target: Scorer) -> None:
        """Run the target's last layer for positions that are `wanted` of each row and have not been through it."""
        self._store()
        parts = [
            (row, range(max(span.start, positions.start), min(span.stop, positions.stop)))
            for row, positions in zip(rows, wanted, strict=True)
            for span in self._unfinished.get(row, ())
        ]
        if parts := [(row, part) for row, part in parts if part]:
            asked = [row for row, _ in parts], [part.start for _, part in parts], [len(part) for _, part in parts]
            places = self._places(*asked)
            self._kept[places] = target.finish(*asked, self._kept[places])
            for row, part in parts:
                self._forget(row, part)

    def _forget(self, row: int, done: range) -> None:
        """Nothing is left to do for these positions."""
        if row in self._unfinished:
            parts = (
                part
                for span in self._unfinished.pop(row)
                for part in (
                    range(span.start, min(span.stop, done.start)),
                    range(max(span.start, done.stop), span.stop),
                )
            )
            if left := [part for part in parts if part]:
                self._unfinished[row] = left

    @property
    def _kept(self) -> Tensor:
        """[P, H] all vectors."""
        return self.cache.layers[0].flat[0].squeeze(1)

    def _places(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[N] where vectors lie."""
        slots = tuple(self.cache.slot(row) for row in rows)
        return self.cache.addresses(RaggedRows(slots, tuple(starts), tuple(counts)))

    def set_length(self, row: int, length: int) -> None:
        """After a round that the device ran by itself: the first `length` vectors stand."""
        self._store()
        self.cache.set_length(row, length)
        self._forget(row, range(length, sys.maxsize))

    def write_at(self, slots: Tensor, past: Tensor, hidden: Tensor) -> None:
        """`hidden` [R * T, H] of rows at `slots` [R] from position `past` [R] on, all numbers on the device."""
        self._store()
        count = len(hidden) // len(slots)
        self._pool(hidden).index_copy_(0, self._addresses(slots, past, count), hidden)

    def take_at(self, slots: Tensor, starts: Tensor, count: int, like: Tensor) -> Tensor:
        """[R * count, H] like `like` [.., H], from position `starts` [R] on; anything finite before the beginning."""
        self._store()
        return self._pool(like).index_select(0, self._addresses(slots, starts, count))

    def _pool(self, like: Tensor) -> Tensor:
        """[P, H] made now where nothing was heard yet."""
        vectors = like.new_empty(0, 1, like.shape[-1])
        return self.cache.layer(0, vectors, vectors[..., :0]).flat[0].squeeze(1)

    def _addresses(self, slots: Tensor, starts: Tensor, count: int) -> Tensor:
        cache = self.cache
        return ops.lay_out(slots, starts, count, 1, cache.piece, cache.capacity, cache.table).addresses[0]

    def _follows(self, row: int, past: int) -> bool:
        """Whether new vectors go on where the row's own end."""
        return row in self._rows and self.length(row) == past

    def on_keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        self._store()
        if row in self._rows and self.cache.length(row) > start:
            self.cache.keep(row, start, picks)

    def on_copy(self, source: int, row: int, length: int) -> None:
        self._store()
        if row in self._rows and self.length(source) >= length:
            self.cache.copy(source, row, length)
            self._unfinished[row] = list(self._unfinished.get(source, []))
            self._forget(row, range(length, sys.maxsize))


class _Waiting:
    """Vectors of the same rows, one a row and round."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._past: list[int] = []
        self._rounds: list[Tensor] = []  # [B, H] each

    def count(self, row: int) -> int:
        return len(self._rounds) if row in self._rows else 0

    def begin(self, rows: Sequence[int], past: Sequence[int], hidden: Tensor) -> None:
        self._rows, self._past = list(rows), list(past)
        self._rounds = [hidden.clone()]  # a body may write its next ones there

    def goes_on(self, rows: Sequence[int], past: Sequence[int], hidden: Tensor) -> bool:
        """Take the next vector of each row, where these are the next of the same rows and there is room for them."""
        count = len(self._rounds)
        if not 0 < count < MOST_WAITING or len(hidden) != len(rows) or self._rows != list(rows):
            return False
        if [length + count for length in self._past] != list(past):
            return False
        self._rounds.append(hidden.clone())
        return True

    def all(self) -> tuple[list[int], int, Tensor]:
        """Rows, vectors of each, and all of them row by row."""
        hidden = torch.stack(self._rounds, dim=1).flatten(0, 1) if self._rounds else torch.empty(0)
        return self._rows, len(self._rounds), hidden
