"""Ragged key/value rows: every row has its own length, and cutting one back is an assignment.

A layer's keys are one tensor [slots, capacity, heads, size]. A row lives in one slot; the token at position i of slot s
has the address s * capacity + i, so a forward pass writes all its new keys with one indexed copy, whatever the lengths.
Slots in use are kept side by side (the last one moves into a hole), because attention over neighbours can read keys in
place. Everything past a row's keys is finite: a slot is wiped when its row leaves, so that no tenant inherits a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun import ops
from forerun.config import Kernels
from forerun.types import RaggedRows

GRAIN = 64  # capacities are multiples of this
GROWTH = 1.5  # a full pool grows by half, so that copying stays a constant share of writing
LONG = 64  # numbers of a range from which on a tensor of its own is made faster than a list


@dataclass(slots=True)
class Layer:
    """Keys and values of one layer of the model, made when the model first shows their shapes."""

    keys: Tensor  # [slots, capacity, heads, size]
    values: Tensor  # [slots, capacity, heads, size of a value]

    # Two more views of the same memory, made once: a step of a small model is mostly small operations.
    flat: tuple[Tensor, Tensor] = field(init=False)  # slots and positions one axis, for writing
    by_head: tuple[Tensor, Tensor] = field(init=False)  # [slots, heads, capacity, size], for attention

    def __post_init__(self) -> None:
        self.flat = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        self.by_head = self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def resize(self, num_slots: int, capacity: int) -> None:
        self.keys = _resized(self.keys, num_slots, capacity)
        self.values = _resized(self.values, num_slots, capacity)
        self.__post_init__()


@dataclass(slots=True)
class RaggedCache:
    """Rows by name (any integer); slots are found for them."""

    num_slots: int = 0
    capacity: int = 0
    layers: dict[int, Layer] = field(default_factory=dict)
    version: int = 0  # counts how often keys have moved: who holds their addresses looks here
    _slot: dict[int, int] = field(default_factory=dict)  # row -> slot, always 0 .. len - 1
    _tenants: list[int] = field(default_factory=list)  # slot -> row
    _length: dict[int, int] = field(default_factory=dict)  # row -> keys that stand
    _written: dict[int, int] = field(default_factory=dict)  # row -> positions ever written since the slot was wiped

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self._slot)

    def length(self, row: int) -> int:
        return self._length[row]

    def slot(self, row: int) -> int:
        return self._slot[row]

    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(t.nbytes for layer in self.layers.values() for t in (layer.keys, layer.values))

    def admit(self, row: int) -> None:
        """A new, empty row."""
        assert row not in self._slot, f"row {row} is there already"
        self._slot[row] = len(self._slot)
        self._tenants.append(row)
        self._length[row] = self._written[row] = 0
        if len(self._slot) > self.num_slots:
            self._resize(max(len(self._slot), int(self.num_slots * GROWTH) if self.layers else 0), self.capacity)

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

    def clear(self) -> None:
        """Forget all rows, whatever state they are in, and give their memory back."""
        self.version += 1
        self.layers.clear()
        self._slot, self._tenants, self._length, self._written = {}, [], {}, {}
        self.num_slots = self.capacity = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` keys of `source`: a shared prompt is encoded once."""
        assert length <= self._length[source]
        self._copy(self._slot[source], self._slot[target], length)
        self._length[target] = length
        self._written[target] = max(self._written[target], length)

    def rewind(self, row: int, length: int) -> None:
        """Keep the first `length` keys; later ones will be overwritten. Costs nothing."""
        assert 0 <= length <= self._length[row], f"row {row} has {self._length[row]} keys, cannot keep {length}"
        self._length[row] = length

    def set_length(self, row: int, length: int, written: int) -> None:
        """After rounds the device ran by itself: `length` keys stand, and positions below `written` may be dirty."""
        assert length <= written <= self.capacity, f"{length} keys of {written} written, room for {self.capacity}"
        self._length[row] = length
        self._written[row] = max(self._written[row], written)

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Room ahead of need, in one step: whoever holds addresses has to look them up again."""
        if num_slots > self.num_slots or capacity > self.capacity:
            self._resize(num_slots, max(capacity, self.capacity))

    @torch.inference_mode()
    def keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        """Of the keys from `start` on keep those at `picks` (ascending, counted from `start`), moved side by side."""
        picks = list(picks)
        assert not picks or start + picks[-1] < self._length[row], f"row {row} has {self._length[row]} keys"
        if picks != list(range(len(picks))):
            slot, chosen = self._slot[row], torch.tensor(picks) + start
            for layer in self.layers.values():
                for pool in (layer.keys[slot], layer.values[slot]):
                    pool[start : start + len(picks)] = pool[chosen.to(pool.device)]
        self._length[row] = start + len(picks)

    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> RaggedRows:
        """Make room for `counts[i]` new tokens of each row and count them in; the model's pass writes them."""
        past = tuple(self._length[row] for row in rows)
        for row, count in zip(rows, counts, strict=True):
            self._length[row] += count
            self._written[row] = max(self._written[row], self._length[row])
        longest = max(self._length[row] for row in rows)
        if longest > self.capacity:
            self._resize(self.num_slots, max(longest, int(self.capacity * GROWTH)))
        return RaggedRows(tuple(self._slot[row] for row in rows), past, tuple(counts))

    def addresses(self, rows: RaggedRows) -> Tensor:
        """[N] where each new token of `rows` lies when slots and positions are one axis."""
        starts = [slot * self.capacity + past for slot, past in zip(rows.slots, rows.past, strict=True)]
        return ranges(starts, rows.counts)

    def write(self, layer: int, addresses: Tensor, keys: Tensor, values: Tensor, use: Kernels = Kernels.OFF) -> Layer:
        """Store new keys and values ([N, heads, size]) of one layer and return that layer."""
        pool = self.layer(layer, keys, values)
        ops.write(keys, values, addresses, *pool.flat, use)
        return pool

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> Layer:
        """One layer, made now where it is not there yet, for keys and values like these ([N, heads, size])."""
        pool = self.layers.get(layer)
        if pool is None:
            pool = self.layers[layer] = Layer(self._empty(keys), self._empty(values))
            self.version += 1
        return pool

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.num_slots, self.capacity, *like.shape[1:])

    @torch.inference_mode()
    def _resize(self, num_slots: int, capacity: int) -> None:
        self.version += 1
        self.num_slots = max(self.num_slots, num_slots)
        self.capacity = -(-capacity // GRAIN) * GRAIN
        for layer in self.layers.values():
            layer.resize(self.num_slots, self.capacity)

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


def ranges(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """`counts[i]` numbers from `starts[i]` on, one range after the other: [N] int64."""
    spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    if spans and sum(counts) > LONG * len(spans):
        return torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return torch.tensor([number for span in spans for number in span])


def _resized(pool: Tensor, num_slots: int, capacity: int) -> Tensor:
    bigger = pool.new_zeros(num_slots, capacity, *pool.shape[2:])
    bigger[: pool.shape[0], : pool.shape[1]] = pool
    return bigger
