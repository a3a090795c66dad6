"""Causal models that draft token by token inside recorded rounds: a draft model, or the target's own first layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor

from forerun.drafters.device import DeviceRows, DeviceSteps, Draw, Shape
from forerun.models import static_pass
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass

FIRST = 2  # after a draft that was kept whole a draft model is one key behind, so every draft begins with two tokens
STOPS = "stop_below looks at every drafted token"


class ModelDrafter(Protocol):
    """What a drafter with a model of its own is asked here; `DraftModel` is one."""

    stop_below: float | None
    scorer: Scorer
    ids: Tensor | None
    last_id: int | None

    def room(self, longest: int) -> int:
        """As in `DeviceDrafter`."""
        ...

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        """As in `DeviceDrafter`."""
        ...


class DeviceDraftModel(DeviceSteps):
    """A draft model with a cache of its own."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter, self.scorer, self.ids = drafter, drafter.scorer, drafter.ids
        self.scorers, self.caches = (self.scorer,), (self.scorer.cache,)

    @cached_property
    def _pass(self) -> StaticPass:
        return StaticPass(self.scorer)

    def why_not(self, target: Scorer) -> str | None:
        if self.drafter.stop_below is not None:
            return STOPS
        if self.scorer.device != target.device:
            return f"the draft model is on {self.scorer.device}, the target on {target.device}"
        return static_pass.why_not(self.scorer)

    def room(self, longest: int) -> int:
        return self.drafter.room(longest)

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        return FIRST

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        self.drafter.read_up(rows, histories, first)

    def draft(self, rows: DeviceRows, shape: Shape, draw: Draw) -> None:
        """Where a row has only one token, the other of the first step lies before its beginning and is not used."""
        draft_in_steps(self._pass, rows.draft_slots, rows, shape, draw, self.drafter.last_id)

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """A draft of `number` tokens has keys of all of them but the last."""
        known = past + number if number else self.scorer.length(row)
        kept = min(known, length)
        self.scorer.cache.set_length(row, kept)


class DeviceEarlyExit(DeviceSteps):
    """The target's first layers over the target's own cache: it has every key but the last token's, as the target has.

    Keys of guesses lie where the target writes its own when it scores them.
    """

    def __init__(self, scorer: Scorer, stop_below: float | None) -> None:
        self.scorer, self.scorers, self.stop_below = scorer, (scorer,), stop_below

    @cached_property
    def _pass(self) -> StaticPass:
        return StaticPass(self.scorer)

    def why_not(self, target: Scorer) -> str | None:
        return STOPS if self.stop_below is not None else static_pass.why_not(self.scorer)

    def room(self, longest: int) -> int:
        return sys.maxsize

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        return 1

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        """There is nothing that the target has not taken in."""

    def draft(self, rows: DeviceRows, shape: Shape, draw: Draw) -> None:
        draft_in_steps(self._pass, rows.slots, rows, shape, draw)

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """The cache is the target's, whose lengths the engine sets."""


def draft_in_steps(
    model: StaticPass, slots: Tensor, rows: DeviceRows, shape: Shape, draw: Draw, last_id: int | None = None
) -> None:
    """One pass a token. The first takes `shape.first` tokens, of which the last is the row's last one."""
    number, first, bound = shape.drafted, shape.first, shape.key_bound
    passes = [model.rows(slots, rows.past + 1 - first, first, bound)]
    if number > 1:
        passes += model.steps(slots, rows.past + 1, 1, number - 1, bound)
    for step, new in enumerate(passes):
        tokens = rows.block[:, 2 - first : 2] if step == 0 else rows.block[:, step + 1 : step + 2]
        draw(step, model.logits(readable(tokens, last_id), new, last=1))


def readable(tokens: Tensor, last_id: int | None) -> Tensor:
    """Ids that padding gave the target alone are read as the draft's `last_id`: any reading keeps the law.

    A row's text may hold them, and so may copies and the places of a tree that hold no guess.
    """
    return tokens if last_id is None else tokens.clamp(max=last_id)
