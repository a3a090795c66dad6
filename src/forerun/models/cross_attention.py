"""The other side of an encoder-decoder model: what cross-attention reads, kept for as long as a row needs it.

A source's keys and values are a projection of the encoder's states, made once when a row first reads it. They lie in a
cache of their own, in which rows are sources: rows of text that read the same source share one. It takes its memory
from that of the rows, and takes it when a row is said to read the source: so nothing is encoded that finds no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor, nn

from forerun.cache.base import KeyValueCache
from forerun.cache.ragged import GRAIN, GROWTH, RaggedCache
from forerun.config import Kernels
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.math.ragged_attention import Reach
from forerun.models.ragged_states import CrossStates, RaggedStates
from forerun.types import RaggedRows, Source

CROSS_NAMES = ("encoder_attn", "EncDecAttention")


def given_states(source: Source) -> int:
    """The length of a source that needs no encoding."""
    assert source.states is not None, "only an encoder knows how long its states will be"
    return len(source.states)


@dataclass(slots=True)
class Sources:
    """Which row reads which source, and the sources' keys and values."""

    cache: KeyValueCache = field(default_factory=RaggedCache)
    keys_of: Callable[[Source], int] = given_states  # how many keys a source will have, or more
    _of: dict[int, Source] = field(default_factory=dict)  # row -> source
    _number: dict[Source, int] = field(default_factory=dict)  # source -> its row in the cache
    waiting: list[Source] = field(default_factory=list)  # read by someone, not yet encoded
    unread: dict[Source, str] = field(default_factory=dict)  # why the encoder could not read it
    _numbers: Iterator[int] = field(default_factory=count)

    def is_read(self, source: Source) -> bool:
        """Whether it has its memory."""
        return source in self._number

    def read(self, row: int, source: Source) -> None:
        """`row` reads `source` from now on. Raises `CacheFull`, with nothing changed, where its keys find no room.

        The row comes first: whatever ends this early, who lets go of the row finds what was taken for it.
        """
        self._of[row] = source
        if source in self._number:
            return
        try:
            self._number[source] = self._reserve(next(self._numbers), self.keys_of(source))
            self.waiting.append(source)
        except BaseException:
            self.release(row)
            raise

    def _reserve(self, number: int, length: int) -> int:
        self.cache.admit(number)
        try:
            self.cache.extend([number], [length])
        except BaseException:
            self.cache.release(number)
            raise
        return number

    def release(self, row: int) -> Source | None:
        """The row reads no more; its source is returned where nobody else reads it."""
        source = self._of.pop(row, None)
        if source is None or source in self._of.values():
            return None
        self.unread.pop(source, None)
        if source in self.waiting:
            self.waiting.remove(source)
        if (number := self._number.pop(source, None)) is not None:
            self.cache.release(number)
        return source

    def clear(self) -> None:
        """Nobody reads anything any more."""
        self._of, self._number, self.waiting, self.unread = {}, {}, [], {}
        self.cache.clear()

    def of(self, row: int) -> Source:
        if row not in self._of:
            raise InvalidArgument(f"row {row} has no source to read: give one to `read`, or to its Request")
        return self._of[row]

    @torch.inference_mode()
    def put(self, states: Sequence[Tensor], layers: Sequence[Projections], use: Kernels = Kernels.OFF) -> None:
        """Project the states ([S, H]) of all that was waiting into every layer's keys and values.

        Where that fails, for want of memory say, all of them wait on.
        """
        numbers = [self._number[source] for source in self.waiting]
        for number, one in zip(numbers, states, strict=True):
            if (more := len(one) - self.cache.length(number)) > 0:
                self.cache.extend([number], [more])
            elif more < 0:  # a mask has left some out, or it could not be read
                self.cache.release(number)
                self._reserve(number, len(one))
        slots, lengths = tuple(map(self.cache.slot, numbers)), tuple(map(len, states))
        packed = torch.cat(list(states))
        addresses = self.cache.addresses(RaggedRows(slots, (0,) * len(slots), lengths)).to(packed.device)
        for index, project in enumerate(layers):
            self.cache.write(index, addresses, *project(packed), use)
        self.waiting = []

    def place_of(self, row: int) -> tuple[int, int]:
        """Slot and length of a row's source."""
        number = self._number[self.of(row)]
        return self.cache.slot(number), self.cache.length(number)

    def read_by(self, rows: Sequence[int]) -> SourcesRead:
        """What a pass over `rows` reads."""
        return SourcesRead(self.cache, tuple(map(self.place_of, rows)))


@dataclass(frozen=True, slots=True)
class SourcesRead:
    """The sources of a pass, as the host knows them."""

    cache: KeyValueCache
    places: tuple[tuple[int, int], ...]  # slot and length of each row's source

    def cross_states(self, states: RaggedStates) -> CrossStates:
        """What the pass sees of them. Neighbours that read the same source are one row to cross-attention."""
        pairs = zip(self.places, states.rows.counts, strict=True)
        groups = [(place, sum(count for _, count in members)) for place, members in groupby(pairs, key=lambda m: m[0])]
        slots, lengths = zip(*(place for place, _ in groups), strict=True)
        return CrossStates(states, self.cache, slots, lengths, tuple(count for _, count in groups))


class SourceTable:
    """Where each slot of a scorer's rows finds its source, on the device: what passes of fixed shape look up."""

    def __init__(self) -> None:
        self.table = torch.zeros(2, 0, dtype=torch.int32)  # source's slot and length, by the row's slot
        self.longest = 0  # no source has more keys
        self.version = 0  # counts how often the table has moved, or passes have to reckon with longer sources
        self._written: list[list[int]] = []

    def write(self, rows: KeyValueCache, sources: Sources, device: torch.device) -> None:
        """As things stand now. Slots of nobody's look at one key of whatever lies first."""
        slots, lengths = [0] * rows.num_slots, [1] * rows.num_slots
        for row in rows.rows:
            slots[rows.slot(row)], lengths[rows.slot(row)] = sources.place_of(row)
        if self.table.shape[1] != rows.num_slots:
            self.table = torch.zeros(2, rows.num_slots, dtype=torch.int32, device=device)
            self.version += 1
            self._written = []
        if (longest := max(lengths, default=0)) > self.longest:
            self.longest = -(-max(longest, int(GROWTH * self.longest)) // GRAIN) * GRAIN
            self.version += 1
        if self._written != [slots, lengths]:
            self._written = [slots, lengths]
            self.table.copy_(torch.tensor(self._written, dtype=torch.int32))

    def cross_states(self, states: RaggedStates, sources: Sources, self_reach: Reach) -> CrossStates:
        """What a pass over the rows of `self_reach` sees of their sources."""
        slots, lengths = self.table.index_select(1, self_reach.slots).unbind()
        reach = Reach(
            slots, lengths, self_reach.starts, self_reach.most_tokens, self.longest,
            across=True, table=sources.cache.table,
        )  # fmt: skip
        return CrossStates(states, sources.cache, (), (), (), reach)


Projections = Callable[[Tensor], tuple[Tensor, Tensor]]  # [M, H] states -> keys and values [M, heads, size]


def projections(decoder: nn.Module) -> list[Projections]:
    """How each layer of a decoder makes cross-attention's keys and values."""
    modules: list[Any] = [m for name, m in decoder.named_modules() if name.rsplit(".", 1)[-1] in CROSS_NAMES]
    if not modules:
        raise UnsupportedModel(f"{type(decoder).__name__} has no cross-attention named {' or '.join(CROSS_NAMES)}")
    return [_projection(module) for module in modules]


def _projection(module: Any) -> Projections:
    key, value = (getattr(module, f"{name}_proj", None) or getattr(module, name) for name in ("k", "v"))
    size = getattr(module, "key_value_proj_dim", None) or module.head_dim

    def project(states: Tensor) -> tuple[Tensor, Tensor]:
        return key(states).unflatten(-1, (-1, size)), value(states).unflatten(-1, (-1, size))

    return project
