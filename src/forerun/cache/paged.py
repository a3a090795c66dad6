"""Key/value rows in blocks of one size, anywhere in a pool that never moves and never grows.

A layer's keys are one tensor [blocks, block size, heads, size], allocated once. A row is a list of blocks; a table on
the device, at an address that stays, says where they lie: entry [slot, i] is the block of positions i * block size on.
Block 0 belongs to nobody: dummies write there, and so does whatever lies past the blocks a row was given. So recorded
work stays valid for as long as the cache lives, whatever rows come, grow and go.

What an encoder has read for rows lies in blocks of the same pool: `for_sources`.
Rows share full blocks by reference, and a row that would write to a block that others read gets a copy of it first. The
last block of a row can be found as far as it has been made known, and whoever finds it copies that much.
What lies past a row's keys may be anything, NaN included: nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from weakref import ref

import torch
from torch import Tensor

from forerun.cache.base import LONG, STRAY, CacheFull, CacheLayer, KeyValueCache, NewRow, RowsRead, ranges
from forerun.cache.blocks import SCRATCH, BlockPool
from forerun.cache.journal import change
from forerun.cache.ragged import RaggedCache
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.scaled import Scheme
from forerun.math.transfer import copy_into, int64
from forerun.types import RaggedRows, Source

BLOCK_SIZE = 128  # the most keys that an attention kernel reads at a time: a tile never straddles two blocks
MOST_ROWS = 1024  # rows that the first table has entries for; with more it has to move
WORTH_COPYING = 16  # tokens of a block that only begins alike: fewer are encoded again, which is as fast


class PagedCache(KeyValueCache):
    """`num_tokens` keys of all rows together; a function is asked once, when the first row comes.

    No row has more than `longest` keys, where that is known: it bounds the width of the table. Keys and values are
    rounded by a `scheme`, if one is given; those of drafters `beside` it are not.
    """

    reads_in_place = False

    def __init__(
        self,
        num_tokens: int | Callable[[], int],
        device: torch.device,
        *,
        longest: int | None = None,
        block_size: int = BLOCK_SIZE,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__()
        self.device, self.block_size, self.scheme = device, block_size, scheme
        self._asked, self._longest = num_tokens, longest
        self._pool: BlockPool | None = None
        self._table = torch.zeros(0, 0, dtype=torch.int32)  # on the host
        self._changed: set[int] = set()  # slots of the host's table that the device does not know yet
        self._free_slots: list[int] = []
        self._blocks: dict[int, list[int]] = {}  # row -> its blocks

    @property
    def num_tokens(self) -> int:
        """Asking for it settles the size."""
        return (self.pool.num_blocks - _blocks_of(STRAY, self.block_size)) * self.block_size

    @property
    def piece(self) -> int:
        return self.block_size

    @property
    def pool(self) -> BlockPool:
        if self._pool is None:
            tokens = self._asked if isinstance(self._asked, int) else self._asked()
            number = _blocks_of(max(tokens, 1), self.block_size) + _blocks_of(STRAY, self.block_size)
            self._pool = BlockPool(number, self.block_size)
            width = number if self._longest is None else min(number, _blocks_of(self._longest + STRAY, self.block_size))
            self.capacity = width * self.block_size
            self._resize_table(MOST_ROWS)
        return self._pool

    @property
    def num_used(self) -> int:
        """Blocks that rows hold."""
        return self.pool.num_blocks - self.pool.num_available

    def bytes_per_key(self) -> float:
        """Of all layers together; 0 before there are any."""
        return self.num_bytes() / ((self.pool.num_blocks + 1) * self.block_size)

    @property
    def usage(self) -> float:
        """Blocks that several rows share count once."""
        return min(self.num_used * self.block_size / self.num_tokens, 1.0)

    def beside(self, device: torch.device) -> KeyValueCache:
        if device.type != self.device.type:
            return RaggedCache()
        return PagedCache(lambda: self.num_tokens, device, longest=self._longest, block_size=self.block_size)

    def for_sources(self) -> PagedCache:
        return _SourceBlocks(self)

    def needs(self, ends: Mapping[int, int], so_far: int = 0) -> int:
        return so_far + sum(max(self._num_blocks(end) - len(self._blocks[row]), 0) for row, end in ends.items())

    def takes(self, needs: int, new: NewRow | None = None) -> bool:
        room = self.pool.num_available
        if new is not None:
            shared = self.pool.find(new.tokens, new.source).blocks
            needs += self._num_blocks(new.end) - len(shared) + self._num_blocks(self.keys_to_read(new.source))
            room -= sum(map(self.pool.is_idle, shared))
        return needs <= room

    @change
    def admit(self, row: int) -> None:
        assert row not in self._slot, f"row {row} is there already"
        assert self.pool is not None  # settles the size
        if not self._free_slots:
            self._resize_table(2 * self.num_slots)
        self._slot[row], self._length[row], self._blocks[row] = heappop(self._free_slots), 0, []

    @change
    def release(self, row: int) -> None:
        slot = self._slot.pop(row)
        heappush(self._free_slots, slot)
        del self._length[row]
        for block in reversed(self._blocks.pop(row)):
            self.pool.drop(block)
        self._table[slot] = SCRATCH
        self._changed.add(slot)

    @change
    def clear(self) -> None:
        """Forget all rows and all that can be found. The memory stays: nothing that was recorded becomes invalid."""
        if self._pool is not None:
            self._pool = BlockPool(self._pool.num_blocks, self.block_size)
        self._slot, self._length, self._blocks = {}, {}, {}
        self._free_slots = list(range(1, self.num_slots))
        self._table.zero_()
        self._changed = set(range(self.num_slots))

    @change
    def give_back(self, device: torch.device) -> None:
        super().give_back(device)
        self.device, self._pool, self.table = device, None, None
        self._table, self.num_slots, self._free_slots = self._table[:0, :0], 0, []

    @change
    def copy(self, source: int, target: int, length: int) -> None:
        """Full blocks are shared; a partial last one is copied."""
        assert length <= self._length[source] and not self._length[target]
        full, rest = divmod(length, self.block_size)
        blocks = self._blocks[source]
        self._share(target, blocks[:full], blocks[full] if rest else SCRATCH, rest)

    @change
    def begin(self, row: int, tokens: Sequence[int], source: Source | None = None) -> int:
        assert not self._length[row]
        prefix = self.pool.find(tokens, source)
        rest = prefix.num_partial if prefix.num_partial >= min(WORTH_COPYING, self.block_size // 2) else 0
        self._share(row, prefix.blocks, prefix.partial, rest)
        return self._length[row]

    @change
    def remember(self, row: int, tokens: Sequence[int], source: Source | None = None) -> None:
        tokens = tokens[: self._length[row]]
        self.pool.publish(tokens, source, self._blocks[row][: self._num_blocks(len(tokens))])

    @change
    def forget(self) -> None:
        if self._pool is not None:
            self._pool.forget_idle()

    @change
    def reserve_slots(self, with_dummy: bool, longest: int = 0, final: int = 0) -> int:
        return 0

    @change
    def reserve(self, rows: Sequence[int], ends: Sequence[int], final: int = 0) -> None:
        self._give(rows, [self._length[row] for row in rows], ends)

    @change
    def set_length(self, row: int, length: int) -> None:
        assert length <= len(self._blocks[row]) * self.block_size, f"row {row} has no memory for {length} keys"
        self._length[row] = length

    @change
    @torch.inference_mode()
    def keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        picks = list(picks)
        assert not picks or start + picks[-1] < self._length[row], f"row {row} has {self._length[row]} keys"
        if picks != list(range(len(picks))):
            places = torch.tensor([self._address(row, start + pick) for pick in picks]).to(self.device)
            targets = torch.tensor([self._address(row, start + i) for i in range(len(picks))]).to(self.device)
            size = self.block_size
            for layer in self.layers.values():
                for pool in layer.stored:
                    pool[targets // size, targets % size] = pool[places // size, places % size]
        self._length[row] = start + len(picks)

    @change
    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> RaggedRows:
        past = tuple(self._length[row] for row in rows)
        ends = [length + count for length, count in zip(past, counts, strict=True)]
        self._give(rows, past, ends)
        self._length.update(zip(rows, ends, strict=True))
        firsts = tuple(map(self._first_block, rows)) if min(counts) >= self.block_size else ()
        return RaggedRows(tuple(self._slot[row] for row in rows), past, tuple(counts), firsts)

    def _first_block(self, row: int) -> int | None:
        """Where a row that has keys begins, if its blocks follow one another: such a row need not be copied."""
        blocks = self._blocks[row]
        return blocks[0] if blocks == list(range(blocks[0], blocks[0] + len(blocks))) else None

    def addresses(self, rows: RaggedRows) -> Tensor:
        if sum(rows.counts) > LONG * len(rows.counts):  # torch's indexing would wake a thread for every core
            return torch.cat(list(map(self._addresses_of, rows.slots, rows.past, rows.counts)))
        positions = ranges(rows.past, rows.counts)
        slots = torch.tensor(rows.slots).repeat_interleave(torch.tensor(rows.counts))
        return self._table[slots, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def _addresses_of(self, slot: int, past: int, count: int) -> Tensor:
        """The same of one row, block after block."""
        blocks = self._table[slot, past // self.block_size : -(-(past + count) // self.block_size)].long()
        places = blocks[:, None] * self.block_size + torch.arange(self.block_size)
        return places.flatten()[past % self.block_size :][:count]

    def locate(self, rows: RaggedRows, places: Tensor) -> tuple[Tensor, Tensor]:
        here = places.cpu()
        blocks = self._table[torch.tensor(rows.slots)[:, None], here // self.block_size].long()
        return blocks.to(places.device), places % self.block_size

    def read(self, rows: RaggedRows, device: torch.device) -> RowsRead:
        return _Gathered(self, rows, device)

    def check(self) -> None:
        """Raise unless every block is free, findable or held by exactly the rows that are counted for it."""
        read = None if self.sources is None else self.sources.cache
        self.pool.check([*self._blocks.values(), *(read._blocks.values() if isinstance(read, PagedCache) else ())])
        for row, blocks in self._blocks.items():
            assert self._num_blocks(self._length[row]) <= len(blocks)
            assert self._table[self._slot[row], : len(blocks)].tolist() == blocks

    def _empty(self, like: Tensor) -> Tensor:
        """Zeros, because block 0 is read where nothing was written; what other blocks hold is read by nobody."""
        shape = self.pool.num_blocks + 1, self.block_size, *like.shape[1:]
        if self.scheme is not None and like.ndim == 3:
            return ScaledKeys.zeros(shape, self.scheme, like.dtype, like.device)
        return like.new_zeros(shape)

    def _num_blocks(self, keys: int) -> int:
        return _blocks_of(keys, self.block_size)

    def _address(self, row: int, position: int) -> int:
        return self._blocks[row][position // self.block_size] * self.block_size + position % self.block_size

    def _give(self, rows: Sequence[int], past: Sequence[int], ends: Sequence[int]) -> None:
        """Blocks for positions up to `ends`, those from `past` on for each row alone; all of them or none."""
        needed, lacking = 0, []
        for row, length, end in zip(rows, past, ends, strict=True):
            if end > self.capacity:
                raise CacheFull(f"a row of {end} keys: no row can have more than {self.capacity} here")
            blocks, number = self._blocks[row], self._num_blocks(end)
            lack = max(number - len(blocks), 0)
            there = range(length // self.block_size, min(number, len(blocks)))
            lack += sum(self._is_shared(row, index, length) for index in there)
            if lack:
                needed += lack
                lacking.append((row, length, end))
        if needed > self.pool.num_available:
            raise CacheFull(
                f"{needed} more blocks of {self.block_size} tokens are needed, {self.pool.num_available} are free"
            )
        for row, length, end in lacking:
            self._give_row(row, length, end)
        self._send_table()

    def _give_row(self, row: int, length: int, end: int) -> None:
        blocks, slot, number = self._blocks[row], self._slot[row], self._num_blocks(end)
        for index in range(length // self.block_size, min(number, len(blocks))):
            if self._is_shared(row, index, length):
                fresh = self.pool.take()
                self._copy_block(blocks[index], fresh, max(length - index * self.block_size, 0))
                self.pool.drop(blocks[index])
                blocks[index] = fresh
                self._table[slot, index] = fresh
        if (old := len(blocks)) < number:  # entered at once: a long prompt has thousands
            blocks += (self.pool.take() for _ in range(number - old))
            self._table[slot, old:number] = int64(blocks[old:])
        self._changed.add(slot)

    def _is_shared(self, row: int, index: int, length: int) -> bool:
        """Whether a row that writes from `length` on would change what others read of its block `index`."""
        return self.pool.is_shared(self._blocks[row][index], max(length - index * self.block_size, 0))

    def _share(self, row: int, blocks: Sequence[int], partial: int, rest: int) -> None:
        """Give an empty row these full blocks, and a copy of the first `rest` keys of a partial one.

        What was reserved for it before is given back: a round that never came may have left it memory.
        """
        for block in blocks:
            self.pool.hold(block)
        for block in reversed(self._blocks[row]):
            self.pool.drop(block)
        self._table[self._slot[row]] = SCRATCH
        row_blocks = self._blocks[row] = list(blocks)
        self._length[row] = len(row_blocks) * self.block_size
        if rest:
            self.pool.hold(partial)  # taking a block may give away one that nobody holds
            if self.pool.num_available:
                row_blocks.append(self.pool.take())
                self._copy_block(partial, row_blocks[-1], rest)
                self._length[row] += rest
            self.pool.drop(partial)
        self._table[self._slot[row], : len(row_blocks)] = torch.tensor(row_blocks, dtype=torch.int32)
        self._changed.add(self._slot[row])
        self._send_table()

    @torch.inference_mode()
    def _copy_block(self, source: int, target: int, count: int) -> None:
        pools = [pool for layer in self.layers.values() for pool in layer.stored]
        if count and pools:  # one call for all layers is one launch on a GPU
            torch._foreach_copy_([pool[target, :count] for pool in pools], [pool[source, :count] for pool in pools])

    @torch.inference_mode(False)  # rows are released outside of it, too
    def _resize_table(self, num_slots: int) -> None:
        """Slot 0 is that of dummies, whose blocks are all block 0."""
        old, width = self._table, self.capacity // self.block_size
        self._table = torch.zeros(num_slots, width, dtype=torch.int32)
        self._table[: len(old), : old.shape[1]] = old
        self.table = torch.zeros_like(self._table, device=self.device)
        self._free_slots += range(max(self.num_slots, 1), num_slots)
        self._changed, self.num_slots = set(range(len(old))), num_slots
        self.version += 1

    def _send_table(self) -> None:
        """Bring the device's table up to date, in the order of what was launched before and what will be after."""
        if not self._changed:
            return
        assert self.table is not None
        rows = slice(min(self._changed), max(self._changed) + 1)
        copy_into(self.table[rows], self._table[rows].clone())
        self._changed = set()


class _SourceBlocks(PagedCache):
    """Keys of sources in blocks of another cache's pool: in memory that its rows' keys lie in elsewhere.

    It has a table of its own, whose rows may be as long as all blocks together. Its `clear` gives no block back, since
    that of the other cache has a new pool made; once that one has been given back, this one is no longer used.
    """

    def __init__(self, rows: PagedCache) -> None:
        super().__init__(0, rows.device, block_size=rows.block_size, scheme=rows.scheme)
        self._rows = ref(rows)  # which holds this one
        self.layers = rows.layers

    @property
    def pool(self) -> BlockPool:
        rows = self._rows()
        assert rows is not None, "sources without the rows that read them"
        pool = rows.pool
        if not self.capacity:
            self.capacity = pool.num_blocks * self.block_size
            self._resize_table(MOST_ROWS)
        return pool


class _Gathered(RowsRead):
    """Rows copied together, one behind the other: what a CPU, or a layer that no kernel covers, attends to.

    Past a row's keys its last one is repeated, because whatever lies there may be no number.
    """

    def __init__(self, cache: PagedCache, rows: RaggedRows, device: torch.device) -> None:
        super().__init__(RaggedRows(tuple(range(len(rows.slots))), rows.past, rows.counts))
        self._cache, self._rows, self._device = cache, rows, device

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        """Blocks and places within them, [B, 1, longest]; made for the first layer that asks."""
        ends = torch.tensor(self._rows.past) + torch.tensor(self._rows.counts)
        places = torch.minimum(torch.arange(self._rows.longest), ends[:, None] - 1)
        blocks, within = self._cache.locate(self._rows, places)
        return blocks[:, None].to(self._device), within[:, None].to(self._device)

    def of(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        blocks, within = self._index
        heads = torch.arange(layer.keys.shape[2], device=layer.keys.device)[:, None]
        keys, values = (pool[blocks, heads, within] for pool in layer.by_head)
        return keys, values


def _blocks_of(keys: int, size: int) -> int:
    return -(-keys // size)
