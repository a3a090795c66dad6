"""What a key/value cache is: rows of any length that come, grow, share beginnings, are cut back and go.

Two forms keep this contract. `ragged.RaggedCache` gives every row one contiguous piece of memory, which a CPU's kernels
read in place; `paged.PagedCache` cuts rows into blocks of one size that lie anywhere in a pool that never moves, which
is what recorded work on a GPU needs. Rows have names (any integer); a row's slot is what device code knows it by.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun import ops
from forerun.cache.journal import CacheJournal, Change, change
from forerun.config import Kernels
from forerun.errors import ForerunError
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.scaled import Scheme
from forerun.types import RaggedRows, Source

STRAY = 128  # keys beyond its budget that a row which is alone may need: a tree, or rounds under way as it ends
LONG = 64  # numbers of a range from which on a tensor of its own is made faster than a list


class CacheFull(ForerunError, MemoryError):
    """Keys do not fit into the memory a cache may use. Nothing has been written; the caller frees rows or waits."""


@dataclass(slots=True)
class CacheLayer:
    """Keys and values of one layer of the model, made when the model first shows their shapes.

    The first axis counts slots and the second positions of a row, or blocks and positions within a block.
    """

    keys: Tensor  # [slots, capacity, heads, size]
    values: Tensor  # [slots, capacity, heads, size of a value]

    # Two more views of the same memory, made once: a step of a small model is mostly small operations.
    flat: tuple[Tensor, Tensor] = field(init=False)  # the first two axes are one, for writing
    by_head: tuple[Tensor, Tensor] = field(init=False)  # [slots, heads, capacity, size], for attention

    def __post_init__(self) -> None:
        self.flat = _flat(self.keys), _flat(self.values)
        self.by_head = _by_head(self.keys), _by_head(self.values)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All that lies in memory, slots and positions first: what is copied when rows are."""
        both = self.keys, self.values
        return tuple(t for each in both for t in (each.stored if isinstance(each, ScaledKeys) else (each,)))


def _flat(pool: Tensor) -> Tensor:
    return pool.flat() if isinstance(pool, ScaledKeys) else pool.flatten(0, 1)


def _by_head(pool: Tensor) -> Tensor:
    return pool.by_head() if isinstance(pool, ScaledKeys) else pool.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that is not in a cache yet, for the question whether it would fit."""

    tokens: Sequence[int]  # those it begins with, of which some may be shared
    source: Source | None
    end: int  # keys it will need at first


class SourceRoom(Protocol):
    """What an encoder has read for the rows of a cache: keys and values in memory that counts as that cache's."""

    @property
    def cache(self) -> KeyValueCache:
        """Where they lie; its rows are sources."""
        ...

    def is_read(self, source: Source) -> bool:
        """Whether a row reads it, so that it has its memory."""
        ...

    def keys_of(self, source: Source) -> int:
        """How many there are of it, or will be at most."""
        ...


class RowsRead:
    """The rows of one pass as attention in torch reads them: `rows` says in which slots of `of(layer)` they lie."""

    def __init__(self, rows: RaggedRows) -> None:
        self.rows = rows

    def of(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, heads, positions, size]."""
        return layer.by_head


class KeyValueCache(ABC):
    """Rows by name (any integer); slots are found for them."""

    reads_in_place = True  # whether a row is one piece of memory, from slot * capacity on
    # Where rows' blocks lie, [slots, most blocks] int32 on the device, at an address that stays; None where every row
    # is one piece.
    table: Tensor | None = None
    scheme: Scheme | None = None  # how keys and values are rounded

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0  # keys a row can have before memory has to be found for more
        self.layers: dict[int, CacheLayer] = {}
        self.version = 0  # counts how often keys have moved: who holds their addresses looks here
        self.journal: CacheJournal | None = None  # where a cache in another process is to follow this one
        self.sources: SourceRoom | None = None  # what an encoder has read for these rows
        self._slot: dict[int, int] = {}  # row -> slot
        self._length: dict[int, int] = {}  # row -> keys that stand

    def replay(self, changes: Sequence[Change]) -> Any:
        """Repeat changes that another cache of the same kind and size has seen; what the last of them returned."""
        result = None
        for name, arguments, named in changes:
            result = getattr(self, name)(*arguments, **named)
        return result

    def digest(self) -> str:
        """Equal for caches whose rows have the same slots, lengths and blocks; keys and values are not looked at."""
        rows = [(row, self.slot(row), self.length(row)) for row in sorted(self.rows)]
        table = None if self.table is None else self.table.tolist()
        return hashlib.sha256(repr((rows, self.num_slots, self.capacity, table)).encode()).hexdigest()

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self._slot)

    def length(self, row: int) -> int:
        return self._length[row]

    def slot(self, row: int) -> int:
        return self._slot[row]

    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(t.nbytes for layer in self.layers.values() for t in layer.stored)

    @property
    @abstractmethod
    def num_tokens(self) -> int | None:
        """Keys of all rows and of what they read together that there may be; None where nothing bounds them."""

    @property
    @abstractmethod
    def usage(self) -> float | None:
        """Share of that which rows take and what they read, 1 is all; None where nothing bounds it."""

    def keys_of_source(self, source: Source | None) -> int:
        """Keys of what an encoder reads for a row, beside the row's own; 0 where nothing is read here."""
        return 0 if source is None or self.sources is None else self.sources.keys_of(source)

    def keys_to_read(self, source: Source | None) -> int:
        """The same of one row more: 0 where another one reads it already."""
        if source is None or self.sources is None or self.sources.is_read(source):
            return 0
        return self.sources.keys_of(source)

    def has_room(self, ends: Mapping[int, int], new: NewRow | None = None) -> bool:
        """Whether these rows can grow to so many keys, and a new row beside them. This changes nothing."""
        return self.takes(self.needs(ends), new)

    @abstractmethod
    def needs(self, ends: Mapping[int, int], so_far: int = 0) -> int:
        """What these rows and those counted `so_far` need to grow to so many keys: a number that `takes` knows."""

    @abstractmethod
    def takes(self, needs: int, new: NewRow | None = None) -> bool:
        """Whether there is room for what rows need, and for a new row beside them. This changes nothing."""

    @abstractmethod
    def admit(self, row: int) -> None:
        """A new, empty row."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Forget a row."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows and all that was kept, whatever state they are in."""

    @change
    def give_back(self, device: torch.device) -> None:
        """The same, and give the memory back: the model may have come to other shapes, or to another device."""
        self.clear()
        self.layers.clear()
        self.version += 1

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Give the empty row `target` the first `length` keys of `source`: a shared prompt is encoded once."""

    @change
    def begin(self, row: int, tokens: Sequence[int], source: Source | None = None) -> int:
        """Give an empty row the keys of the longest known beginning of `tokens`; how many those are."""
        return 0

    @change
    def remember(self, row: int, tokens: Sequence[int], source: Source | None = None) -> None:
        """Let others find these keys: the row's first ones are those of `tokens`. It may go on behind them."""

    @change
    def forget(self) -> None:
        """Keep no keys that belong to no row."""

    @change
    def rewind(self, row: int, length: int) -> None:
        """Keep the first `length` keys; later ones will be overwritten. Costs nothing."""
        assert 0 <= length <= self._length[row], f"row {row} has {self._length[row]} keys, cannot keep {length}"
        self._length[row] = length

    @abstractmethod
    def reserve_slots(self, with_dummy: bool, longest: int = 0, final: int = 0) -> int:
        """Before rows are written into a row table: the slot that its dummies may write to, where it has some.

        Memory that would have to move later is found now, for rows that have up to `longest` keys and will have up to
        `final`, as far as that is sensible.
        """

    @abstractmethod
    def reserve(self, rows: Sequence[int], ends: Sequence[int], final: int = 0) -> None:
        """Memory for keys below `ends[i]` of each row, which passes on the device will write.

        Where memory has to move for it there will be enough for `final` keys, as far as that is sensible.
        """

    @property
    def piece(self) -> int:
        """Keys of a row that lie side by side: all it may have, or a block of them."""
        return self.capacity

    @property
    def stray_end(self) -> int:
        """Keys to reserve for a row whose first pass on the device begins before its first token."""
        return 0

    @abstractmethod
    def set_length(self, row: int, length: int) -> None:
        """After rounds that the device ran by itself: `length` keys stand."""

    @abstractmethod
    def keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        """Of the keys from `start` on keep those at `picks` (ascending, counted from `start`), moved side by side."""

    @torch.inference_mode()
    def move(self, sources: Tensor, targets: Tensor, use: Kernels = Kernels.OFF) -> None:
        """Copy what lies at the addresses `sources` [N] to `targets` [N] in all layers; what is read is what was."""
        for layer in self.layers.values():
            if isinstance(layer.keys, ScaledKeys):  # as it is stored: rounding twice might not be rounding once
                size = layer.keys.shape[1]
                for pool in layer.stored:
                    pool[targets // size, targets % size] = pool[sources // size, sources % size]
                continue
            keys, values = (pool.index_select(0, sources) for pool in layer.flat)
            ops.write(keys, values, targets, *layer.flat, use)

    @abstractmethod
    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> RaggedRows:
        """Make room for `counts[i]` new tokens of each row and count them in; the model's pass writes them.

        Raises `CacheFull`, with nothing changed, where there is no room.
        """

    @abstractmethod
    def addresses(self, rows: RaggedRows) -> Tensor:
        """[N] where each new token of `rows` lies in a layer's `flat`."""

    @abstractmethod
    def locate(self, rows: RaggedRows, places: Tensor) -> tuple[Tensor, Tensor]:
        """Where positions `places` [B, S] of each row lie: indices of a layer's first and second axis, [B, S or 1]."""

    @abstractmethod
    def read(self, rows: RaggedRows, device: torch.device) -> RowsRead:
        """The rows of a pass for attention in torch, which wants each row in one piece."""

    @abstractmethod
    def beside(self, device: torch.device) -> KeyValueCache:
        """An empty cache for as many tokens, for a drafter that follows the same rows."""

    @abstractmethod
    def for_sources(self) -> KeyValueCache:
        """An empty cache for keys of what an encoder has read for these rows, which takes its memory from this one's.

        One at a time: what was made so before is no longer used.
        """

    def write(
        self, layer: int, addresses: Tensor, keys: Tensor, values: Tensor, use: Kernels = Kernels.OFF
    ) -> CacheLayer:
        """Store new keys and values ([N, heads, size]) of one layer and return that layer."""
        pool = self.layer(layer, keys, values)
        ops.write(keys, values, addresses, *pool.flat, use)
        return pool

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> CacheLayer:
        """One layer, made now where it is not there yet, for keys and values like these ([N, heads, size])."""
        pool = self.layers.get(layer)
        if pool is None:
            pool = self.layers[layer] = CacheLayer(self._empty(keys), self._empty(values))
            self.version += 1
        return pool

    @abstractmethod
    def _empty(self, like: Tensor) -> Tensor:
        """Memory for one layer's keys or values, of the kind of `like` [N, heads, size]."""


def common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def ranges(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """`counts[i]` numbers from `starts[i]` on, one range after the other: [N] int64."""
    spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    if spans and sum(counts) > LONG * len(spans):
        return torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return torch.tensor([number for span in spans for number in span])
