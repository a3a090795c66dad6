"""Blocks of a paged cache: who holds them, and in which of them known tokens can be found.

A block of committed tokens is findable by what it holds: its own tokens behind its parent's, behind the same source. A
full one is shared, the beginning of any other copied: so the row that it belongs to may go on writing behind what is
findable, and what it has gained can be published again. A block that no row holds any more stays findable until its
memory is needed; then the one that was let go first is given away, with everything that was written behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from forerun.cache.base import CacheFull, common_length
from forerun.types import Source

SCRATCH = 0  # block 0 belongs to nobody: dummies write there, and tables name it where a row has no block
LOOKED_AT = 64  # blocks behind the last one that is shared, the newest of them: a server may have seen thousands


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A findable block: `tokens` behind those of its ancestors. A tree's root is a source and has no block.

    Nothing is found behind a block that is not full.
    """

    tokens: tuple[int, ...]
    block: int
    parent: PrefixNode | None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known beginning of some tokens."""

    blocks: tuple[int, ...] = ()  # full ones, to be shared
    partial: int = SCRATCH  # a block whose first `num_partial` tokens follow those, to be copied
    num_partial: int = 0


class BlockPool:
    """Blocks 1 .. `num_blocks` of `size` tokens each, counted by how many rows hold them."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks, self.size = num_blocks, size
        self._holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._idle: dict[int, None] = {}  # findable blocks that nobody holds, in the order they were let go
        self._roots: dict[Source | None, PrefixNode] = {}
        self._node: dict[int, PrefixNode] = {}  # block -> where it is found

    @property
    def num_available(self) -> int:
        """Blocks that no row holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_findable(self) -> int:
        return len(self._node)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def is_shared(self, block: int, start: int) -> bool:
        """Whether writing to it from place `start` on would change what somebody else reads, now or later."""
        node = self._node.get(block)
        return self._holders[block] > 1 or (node is not None and start < len(node.tokens))

    def take(self) -> int:
        """A block for one row, with whatever it held before."""
        if not self._free:
            if not self._idle:
                raise CacheFull(f"all {self.num_blocks} blocks of {self.size} tokens are in use")
            self._forget(next(iter(self._idle)))
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more row reads it."""
        self._idle.pop(block, None)
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One row less. Drop a row's last block first: then its end is given away before its beginning."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._node:
            self._idle[block] = None
        else:
            self._free.append(block)

    def find(self, tokens: Sequence[int], source: Source | None) -> PrefixMatch:
        """The blocks that hold the longest known beginning of `tokens`."""
        node, blocks, start = self._roots.get(source), [], 0
        if node is None:
            return PrefixMatch()
        while (child := node.children.get(tuple(tokens[start : start + self.size]))) is not None:
            if len(child.tokens) < self.size:
                break
            node, start = child, start + self.size
            blocks.append(child.block)
        rest = tokens[start : start + self.size]
        newest = islice(reversed(node.children.values()), LOOKED_AT if rest else 0)
        shared = {common_length(child.tokens, rest): child.block for child in newest}
        most = max(shared, default=0)
        return PrefixMatch(tuple(blocks), shared[most] if most else SCRATCH, most)

    def publish(self, tokens: Sequence[int], source: Source | None, blocks: Sequence[int]) -> None:
        """Make `blocks` findable, which hold `tokens`; the last may hold more, or more to come.

        What can be found already is left where it is; a block that has gained tokens is found by all of them.
        """
        node = self._roots.setdefault(source, PrefixNode((), SCRATCH, None))
        start = self._num_published(blocks)
        if start:
            node = self._node[blocks[start - 1]]
        for index, block in enumerate(blocks[start:], start):
            text = tuple(tokens[index * self.size : (index + 1) * self.size])
            before = self._node.get(block)
            if before is not None and before.parent is node and text[: len(before.tokens)] == before.tokens != text:
                self._unlist(before)
            child = node.children.get(text)
            if child is None:
                if not text or block in self._node:
                    break
                child = node.children[text] = self._node[block] = PrefixNode(text, block, node)
            node = child
        if not self._roots[source].children:
            del self._roots[source]

    def _num_published(self, blocks: Sequence[int]) -> int:
        """How many of a row's blocks, full ones, are behind each other where they are found: a long prompt is published
        again with every part of it that is read. Nobody writes to a full block that is findable, so it is the row's."""
        for number in range(len(blocks), 0, -1):
            node = self._node.get(blocks[number - 1])
            if node is not None and len(node.tokens) == self.size:
                return number
        return 0

    def forget_idle(self) -> None:
        """Free every block that nobody holds."""
        while self._idle:
            self._forget(next(iter(self._idle)))

    def _forget(self, block: int) -> None:
        """Nobody finds this block any more, nor those written behind it."""
        node = self._node[block]
        assert node.parent is not None
        self._unlist(node)
        if node.parent.parent is None and not node.parent.children:
            self._roots = {source: root for source, root in self._roots.items() if root.children}
        behind = [node]
        while behind:
            node = behind.pop()
            behind += node.children.values()
            self._node.pop(node.block, None)
            if node.block in self._idle:
                del self._idle[node.block]
                self._free.append(node.block)

    def _unlist(self, node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens], self._node[node.block]

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raise unless the counts are those of rows that hold `held`, and every block is somewhere once."""
        counts = [0] * (self.num_blocks + 1)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "a block is held by more or fewer rows than there are"
        loose = sorted([*self._free, *self._idle])
        assert loose == [b for b in range(1, self.num_blocks + 1) if not counts[b]], "a block was lost or given twice"
        assert all(self._node[block].block == block for block in self._idle)
