"""How a drafter drafts inside a recorded round: on tensors that stay where they are, without asking the host.

A drafter that can do so returns a `DeviceDrafter` from `Drafter.device_draft`. How it drafts is recorded once a shape
and replayed; everything else in here is called by the host between launches and keeps the drafter's own lengths right.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache.base import KeyValueCache
from forerun.models.scorer import HiddenStateObserver, Scorer


@dataclass(frozen=True, slots=True)
class Shape:
    """What the recordings of a round are made for, beside the number of rows."""

    drafted: int  # K
    scored: int  # T
    key_bound: int  # no row has more keys than this
    first: int = 0  # tokens of each row that the first step of a draft takes in
    # Where the host found copies for some rows: what the device drafts for the others, at most K. None: no row has one.
    steps: int | None = None
    is_tree: bool = False  # K is then the depth of the tree

    @property
    def drawn(self) -> int:
        """Tokens that the device drafts."""
        return self.drafted if self.steps is None else self.steps


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What a recorded draft may read of R rows. All of it lies on the device, and `block` is written by `Draw`."""

    slots: Tensor  # [R] int64, in the target's cache
    draft_slots: Tensor  # [R] int64, in the drafter's own caches; the target's slots where it has none
    past: Tensor  # [R] int64, keys in the target's cache
    block: Tensor  # [R, 1 + W] int64: the token before the last one, the last one, the draft behind it
    recent: Tensor  # [R, W] int64: each row's last tokens, the last one last, where a drafter `reads_recent`


class Draw(Protocol):
    """Draws the token of one step for every row and writes it into the block, behind those drawn before."""

    def __call__(self, step: int, logits: Tensor) -> None:
        """`logits` [R, V], or [R, Vd] of the drafter's `ids`."""
        ...


class DeviceDrafter(ABC):
    """A drafter's side of recorded rounds behind one target."""

    ids: Tensor | None = None
    """[Vd] ascending: all the draft can say, where that is not the target's vocabulary."""
    scorers: tuple[Scorer, ...] = ()
    """Models that a draft runs, beside the target: recordings hold the addresses of their keys and weights."""
    caches: tuple[KeyValueCache, ...] = ()
    """Where rows of its own live, each with the same slot in all of them; empty where it needs the target's alone."""
    observer: HiddenStateObserver | None = None
    """What it has among the target's observers: recorded rounds hand hidden states to `on_hidden_states` instead."""
    most = sys.maxsize
    """No draft has more tokens."""
    reads_recent = False
    """Whether it reads more of a row than its last two tokens."""

    @abstractmethod
    def why_not(self, target: Scorer) -> str | None:
        """What keeps it from drafting in recorded rounds behind `target`; None where nothing does."""

    @property
    def version(self) -> Hashable:
        """Changes when something has moved whose address a recorded draft holds."""
        return tuple(scorer.version for scorer in self.scorers), tuple(cache.version for cache in self.caches)

    @abstractmethod
    def room(self, longest: int) -> int:
        """Tokens it can draft for a row of `longest` tokens."""

    def knows(self, row: int, length: int) -> bool:
        """Whether it has all it needs to draft for a row of `length` tokens; else the round goes step by step."""
        return True

    @abstractmethod
    def num_first(self, number: int, pending: Sequence[int]) -> int:
        """Tokens of each row that the first step of a draft of `number` tokens takes in.

        `pending` are the draft lengths of rounds that were launched before and whose outcome the host does not know.
        """

    def num_tokens(self, number: int) -> int:
        """Tokens that a draft of length `number` has: more where the length is a tree's depth."""
        return number

    def num_keys(self, number: int) -> int:
        """Keys that such a draft writes behind those of its row."""
        return number

    @abstractmethod
    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        """Take in everything of each row that a first step of `first` tokens will not; no round is pending."""

    def on_hidden_states(self, rows: DeviceRows, hidden: Tensor) -> None:
        """`hidden` [R * T, H]: what the target made of T tokens of each row behind its `past`. Recorded as well."""
        return

    @abstractmethod
    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """A round that drafted `number` tokens was collected: `row` had `past` keys in the target and has `length`."""


class DeviceSteps(DeviceDrafter):
    """A drafter that makes logits of one step after the other."""

    @abstractmethod
    def draft(self, rows: DeviceRows, shape: Shape, draw: Draw) -> None:
        """Call `draw` for steps 0 .. K - 1 in order. Recorded: no value may be read on the host.

        K may be more than `most`: what is drawn for later steps is not used, but must be drawn from numbers.
        """


@dataclass(frozen=True, slots=True)
class Level:
    """The guesses of trees that a drafter is asked about, W more a level: L so far, of which the last W are new."""

    tokens: Tensor  # [R, L] int64
    seen: Tensor  # [R, L, L] bool: itself and those it descends from
    parents: Tensor  # [R, W] int64: which of the guesses a new one follows, -1 for the row's last token
    width: int  # W

    @property
    def depths(self) -> Tensor:
        """[L] int64"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) // self.width + 1


class DeviceLevels(DeviceDrafter):
    """A drafter that can be asked about several guesses at once: what trees are grown with on the device.

    Unlike a chain's, the keys of a tree's guesses are never kept: a draft begins with all that the row has gained.
    """

    @abstractmethod
    def roots(self, rows: DeviceRows, shape: Shape) -> Tensor:
        """Logits [R, Vd] after each row's last token."""

    @abstractmethod
    def behind(self, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
        """Logits [R * W, Vd] behind the new guesses of a level, row by row."""
