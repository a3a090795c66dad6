"""Ragged key/value rows: every row has its own length, and cutting one back is an assignment.

A layer's keys are one tensor [slots, capacity, heads, size]. A row lives in one slot; the token at position i of slot s
has the address s * capacity + i, so a forward pass writes all its new keys with one indexed copy, whatever the lengths.
Slots in use are kept side by side (the last one moves into a hole), because attention over neighbours can read keys in
place. Everything past a row's keys is finite: a slot is wiped when its row leaves, so that no tenant inherits a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add
from weakref import WeakSet

import torch
from torch import Tensor

from forerun.cache.base import STRAY, CacheFull, KeyValueCache, NewRow, RowsRead, ranges
from forerun.cache.journal import change
from forerun.types import RaggedRows, Source

GRAIN = 64  # capacities are multiples of this
GROWTH = 1.5  # a full pool grows by half, so that copying stays a constant share of writing
AHEAD = 4096  # the most keys that memory is reserved for before anybody needs it


class RaggedCache(KeyValueCache):
    """One piece of memory a row. `num_tokens` bounds slots times capacity; None lets them grow as rows do.

    A cache `for_sources` has slots and a capacity of its own: both together are bounded. What one of them has in
    reserve it gives back when the other needs it.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._tenants: list[int] = []  # slot -> row; slots in use are always 0 .. len - 1
        self._written: dict[int, int] = {}  # row -> positions ever written since the slot was wiped
        self._num_dummies = 0  # slots beside those of rows that a row table names
        self._sharing: WeakSet[RaggedCache] = WeakSet([self])  # all caches that `num_tokens` bounds together

    @property
    def num_tokens(self) -> int | None:
        return self._num_tokens

    @property
    def usage(self) -> float | None:
        """Every row takes as much as the longest: so `takes` counts. The same of sources."""
        if not self._num_tokens:
            return None
        return min(sum(cache.least_memory for cache in self._sharing) / self._num_tokens, 1.0)

    @property
    def least_memory(self) -> int:
        """Tokens that its rows take at least."""
        return len(self._slot) * self._longest

    @property
    def memory(self) -> int:
        """Tokens that memory is held for, beyond what rows need included."""
        return self.num_slots * self.capacity

    @property
    def _longest(self) -> int:
        return max(self._length.values(), default=0)

    @property
    def _others(self) -> Iterator[RaggedCache]:
        return (cache for cache in self._sharing if cache is not self)

    def beside(self, device: torch.device) -> RaggedCache:
        return RaggedCache(self._num_tokens)

    def for_sources(self) -> RaggedCache:
        sources = RaggedCache(self._num_tokens)
        sources._sharing = self._sharing = WeakSet([self, sources])
        return sources

    def needs(self, ends: Mapping[int, int], so_far: int = 0) -> int:
        return max(so_far, max(ends.values(), default=0))

    def takes(self, needs: int, new: NewRow | None = None) -> bool:
        if self._num_tokens is None:
            return True
        longest = max(needs, self._longest, 0 if new is None else new.end)
        read = self._memory_read(None if new is None else new.source)
        return self._fits(len(self._slot) + (new is not None), longest, read)

    def _memory_read(self, source: Source | None) -> int:
        """Tokens that sources take at least, once this one is read as well."""
        others, new = sum(cache.least_memory for cache in self._others), self.keys_to_read(source)
        if not new or self.sources is None:
            return others
        lengths = [new, *map(self.sources.cache.length, self.sources.cache.rows)]
        return len(lengths) * max(lengths)

    def _fits(self, num_slots: int, longest: int, beside: int) -> bool:
        """Whether so many rows do, beside as many tokens of the other cache. A row that is alone may have some more."""
        if self._num_tokens is None:
            return True
        is_alone = num_slots == 1 and all(len(cache.rows) <= 1 for cache in self._others)
        return num_slots * longest + beside <= self._num_tokens + (STRAY if is_alone else 0)

    @change
    def admit(self, row: int) -> None:
        assert row not in self._slot, f"row {row} is there already"
        self._slot[row] = len(self._slot)
        self._tenants.append(row)
        self._length[row] = self._written[row] = 0
        if (number := len(self._slot)) > self.num_slots:
            wanted = max(number, int(self.num_slots * GROWTH) if self.layers else 0)
            longest = self._longest if self.capacity else 0
            self._resize(number, longest, wanted, self.capacity)

    @change
    def release(self, row: int) -> None:
        """Forget a row; the last slot moves into its place."""
        hole = self._slot.pop(row)
        self._wipe(hole, self._written.pop(row))
        del self._length[row]
        mover = self._tenants.pop()
        if mover == row:
            return
        last = len(self._tenants)
        self._copy(last, hole, self._length[mover])
        self._wipe(last, self._written[mover])
        self._tenants[hole] = mover
        self._slot[mover], self._written[mover] = hole, self._length[mover]

    @change
    def clear(self) -> None:
        """Forget all rows, whatever state they are in, and give their memory back."""
        self.version += 1
        self.layers.clear()
        self._slot, self._tenants, self._length, self._written = {}, [], {}, {}
        self.num_slots = self.capacity = 0

    @change
    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self._length[source]
        self._copy(self._slot[source], self._slot[target], length)
        self._length[target] = length
        self._written[target] = max(self._written[target], length)

    @change
    def set_length(self, row: int, length: int) -> None:
        assert length <= self.capacity, f"{length} keys, room for {self.capacity}"
        self._length[row] = length
        self._written[row] = max(self._written[row], length)

    @change
    def reserve_slots(self, with_dummy: bool, longest: int = 0, final: int = 0) -> int:
        """Behind those of rows, so that it is the same in all caches of the same rows, however much memory each has.

        Whoever holds addresses has to look them up again where this needs more memory.
        """
        self._num_dummies = max(self._num_dummies, int(with_dummy))  # another table may still name it
        needed = len(self._slot) + self._num_dummies
        capacity = max(self.capacity, min(final, longest + AHEAD))
        if needed > self.num_slots or capacity > self.capacity:
            self._resize(needed, self.capacity, needed, capacity)
        return len(self._slot)

    @change
    def reserve(self, rows: Sequence[int], ends: Sequence[int], final: int = 0) -> None:
        self._grow(max(ends), min(final, max(ends) + AHEAD))
        for row, end in zip(rows, ends, strict=True):
            self._written[row] = max(self._written[row], end)

    @property
    def stray_end(self) -> int:
        """What lies before a row's beginning goes to its last place."""
        return self.capacity

    @change
    @torch.inference_mode()
    def keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        picks = list(picks)
        assert not picks or start + picks[-1] < self._length[row], f"row {row} has {self._length[row]} keys"
        if picks != list(range(len(picks))):
            slot, chosen = self._slot[row], torch.tensor(picks) + start
            for layer in self.layers.values():
                for pool in (layer.keys[slot], layer.values[slot]):
                    pool[start : start + len(picks)] = pool[chosen.to(pool.device)]
        self._length[row] = start + len(picks)

    @change
    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> RaggedRows:
        past = tuple(self._length[row] for row in rows)
        self._grow(max(map(add, past, counts)), int(self.capacity * GROWTH))
        for row, length, count in zip(rows, past, counts, strict=True):
            self._length[row] = length + count
            self._written[row] = max(self._written[row], length + count)
        return RaggedRows(tuple(self._slot[row] for row in rows), past, tuple(counts))

    def addresses(self, rows: RaggedRows) -> Tensor:
        starts = [slot * self.capacity + past for slot, past in zip(rows.slots, rows.past, strict=True)]
        return ranges(starts, rows.counts)

    def locate(self, rows: RaggedRows, places: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(rows.slots, device=places.device)[:, None], places

    def read(self, rows: RaggedRows, device: torch.device) -> RowsRead:
        return RowsRead(rows)

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.num_slots, self.capacity, *like.shape[1:])

    @torch.inference_mode()
    def _resize(self, needed_slots: int, needed_keys: int, num_slots: int, capacity: int) -> None:
        """Memory for `num_slots` of `capacity` keys, or for as much of it as a budget allows above what is needed."""
        num_slots, capacity = max(self.num_slots, num_slots), -(-capacity // GRAIN) * GRAIN
        if self._num_tokens is not None and num_slots * capacity > self._left:
            if needed_slots * needed_keys > self._left:
                for cache in self._others:
                    cache._give_back_reserve()
            num_slots = needed_slots
            capacity = max(needed_keys, min(capacity, self._left // num_slots))
        before = self.num_slots, self.capacity
        self._set_size(num_slots, capacity)
        try:
            for layer in self.layers.values():
                layer.keys = _resized(layer.keys, num_slots, capacity)
                layer.values = _resized(layer.values, num_slots, capacity)
                layer.__post_init__()
        except BaseException:
            self._lose_keys(*before)
            raise

    @property
    def _left(self) -> int:
        """Of the budget, beside what the other cache holds."""
        assert self._num_tokens is not None
        return max(self._num_tokens - sum(cache.memory for cache in self._others), 0)

    @torch.inference_mode()
    def _give_back_reserve(self) -> None:
        """Keep what rows need and no more. Where there is no memory to move them all stays as it is: their keys are
        wanted by rows that this call is not about."""
        num_slots, capacity = len(self._slot) + self._num_dummies, self._longest
        if num_slots * capacity >= self.memory:
            return
        layers = list(self.layers.values())
        keys = [_resized(layer.keys, num_slots, capacity) for layer in layers]
        values = [_resized(layer.values, num_slots, capacity) for layer in layers]
        before = [(layer.keys, layer.values) for layer in layers]
        try:
            for layer, *moved in zip(layers, keys, values, strict=True):
                layer.keys, layer.values = moved
                layer.__post_init__()
            self._set_size(num_slots, capacity)
        except BaseException:  # an interrupt: layers of two sizes would be wrong addresses in some
            for layer, stored in zip(layers, before, strict=True):
                layer.keys, layer.values = stored
                layer.__post_init__()
            raise

    def _set_size(self, num_slots: int, capacity: int) -> None:
        if capacity < self.capacity:
            self._written = {row: min(end, capacity) for row, end in self._written.items()}
        self.version += 1
        self.num_slots, self.capacity = num_slots, capacity

    def _lose_keys(self, num_slots: int, capacity: int) -> None:
        """Layers came to have different sizes, so no address is right in all of them: rows go on without a key."""
        self.layers.clear()
        self.num_slots, self.capacity = max(num_slots, len(self._slot)), capacity
        self._length, self._written = dict.fromkeys(self._length, 0), dict.fromkeys(self._written, 0)

    def _grow(self, longest: int, wanted: int) -> None:
        """Room for rows of `longest` keys, and of `wanted` where that is allowed."""
        if longest <= self.capacity:
            return
        beside = sum(cache.least_memory for cache in self._others)
        if not self._fits(len(self._slot), longest, beside):
            read = f" beside {beside} tokens that an encoder has read, or that read it," if beside else ""
            raise CacheFull(f"{len(self._slot)} rows of {longest} keys{read} are more than {self._num_tokens} tokens")
        self._resize(len(self._slot) + self._num_dummies, longest, self.num_slots, max(longest, wanted))

    @torch.inference_mode()
    def _wipe(self, slot: int, length: int) -> None:
        if length and self.layers:
            torch._foreach_zero_(self._parts(slot, length))

    @torch.inference_mode()
    def _copy(self, source: int, target: int, length: int) -> None:
        if length and self.layers:
            torch._foreach_copy_(self._parts(target, length), self._parts(source, length))

    def _parts(self, slot: int, length: int) -> list[Tensor]:
        """The first keys and values of a slot in all layers: one call for all of them is one launch on a GPU."""
        return [pool[slot, :length] for layer in self.layers.values() for pool in (layer.keys, layer.values)]


def _resized(pool: Tensor, num_slots: int, capacity: int) -> Tensor:
    resized = pool.new_zeros(num_slots, capacity, *pool.shape[2:])
    slots, keys = min(num_slots, pool.shape[0]), min(capacity, pool.shape[1])
    resized[:slots, :keys] = pool[:slots, :keys]
    return resized
